"""What `attn-ext walkthrough` says, in English and in Chinese, side by side."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """One text in both languages. {names} are filled in by str.format."""

    en: str
    zh: str


# Seven tokens either way.
TOKENS = {
    "en": ("far", "away", "there", "is", "an", "apple", "tree"),
    "zh": ("远", "处", "有", "一", "棵", "苹果", "树"),
}

TITLE = Words(
    "Attention by hand: {length} tokens, {width} features each, random seed {seed}",
    "手算注意力：{length} 个词元，每个 {width} 个特征，随机种子 {seed}",
)
SENTENCE = Words(
    "The sentence is “{sentence}”. Each token is a row of X {shape}. Here the rows are random numbers; in a model "
    "they are learned. So are the three matrices W_Q, W_K and W_V {square}.",
    "句子是“{sentence}”。每个词元是 X {shape} 的一行。这里的数是随机的，在真正的模型里则是学出来的；"
    "三个矩阵 W_Q、W_K、W_V {square} 也一样。",
)
STEP_1 = Words("Step 1. Queries, keys and values", "第 1 步：查询、键和值")
STEP_1_TEXT = Words(
    "Q = X·W_Q is what a token asks for, K = X·W_K is what it can be found by, V = X·W_V is what it hands on. "
    "Each is {shape}.",
    "Q = X·W_Q 表示词元想找什么，K = X·W_K 表示它凭什么被找到，V = X·W_V 表示它交出什么。三者的形状都是 {shape}。",
)
STEP_2 = Words("Step 2. Scores", "第 2 步：打分")
STEP_2_TEXT = Words(
    "scores = Q·Kᵀ is {shape}. Row i, column j: how well what token i asks for fits the key of token j.",
    "scores = Q·Kᵀ，形状 {shape}。第 i 行第 j 列：词元 i 的查询与词元 j 的键有多合拍。",
)
STEP_3 = Words("Step 3. Scale", "第 3 步：缩放")
STEP_3_TEXT = Words(
    "scaled = scores / √d_k = scores / {root}. The more features, the larger the scores; unscaled, softmax would "
    "give nearly everything to one key and leave no gradient to learn from. The scores ran from {lowest} to "
    "{highest}, now they run from {scaled_lowest} to {scaled_highest}.",
    "scaled = scores / √d_k = scores / {root}。特征越多，分数越大；若不缩放，softmax 会把几乎全部权重给一个键，"
    "梯度也随之消失，学不到东西。分数原来在 {lowest} 到 {highest} 之间，现在在 {scaled_lowest} 到 "
    "{scaled_highest} 之间。",
)
STEP_4 = Words("Step 4. Softmax", "第 4 步：softmax")
STEP_4_TEXT = Words(
    "weights = softmax of every row, {shape}. The row's maximum is subtracted before exp, so that nothing can "
    "overflow. All weights are positive, and every row sums to 1.",
    "weights 是对每一行做 softmax 的结果，形状 {shape}。取 exp 之前先减去这一行的最大值，就不会溢出。"
    "权重全为正，每行之和为 1。",
)
STEP_5 = Words("Step 5. Output", "第 5 步：输出")
STEP_5_TEXT = Words(
    "output = weights·V is {shape}: each row is a mean of the rows of V, weighted by one row of the weights.",
    "output = weights·V，形状 {shape}：每一行都是 V 各行的加权平均，所用的权重就是 weights 的对应行。",
)
HEAT_MAP = Words(
    "The weights as a heat map, in percent (queries down, keys across)",
    "权重热力图，单位为百分比（行是查询，列是键）",
)
KERNEL = Words("The same numbers from the C++ kernel", "用 C++ 内核再算一遍")
KERNEL_TEXT = Words(
    "attn_ext.attention on the same Q, K and V, with the instruction set {isa}. Largest difference from NumPy:",
    "把同样的 Q、K、V 交给 attn_ext.attention（指令集 {isa}）。与 NumPy 结果的最大差值：",
)
EXAMPLE = Words("example", "例子")
OUTPUT = Words("output", "输出")
WEIGHTS = Words("weights", "权重")
EXAMPLES = {
    "plain": Words("steps 1 to 5", "第 1 至 5 步"),
    "heads": Words("two heads", "两个头"),
    "causal": Words("causal mask", "因果掩码"),
    "padding": Words("padding mask", "填充掩码"),
}
AGREE = Words("They agree to rounding.", "除舍入误差外完全一致。")
DISAGREE = Words("They DISAGREE.", "两者不一致！")
HEADS = Words("Several heads", "多个头")
HEADS_TEXT = Words(
    "{heads} heads split the {width} features between them: Q {flat} is viewed as {viewed} and transposed to "
    "{split}, K and V likewise. Each head takes steps 2 to 5 by itself, now with √d_k = √{head_width}, and so "
    "looks in its own way. Its outputs {split} are then put side by side again: {flat}.",
    "{heads} 个头平分 {width} 个特征：Q {flat} 先看成 {viewed}，再转置成 {split}，K、V 同理。每个头各自走第 2 至 5 步"
    "（此时 √d_k = √{head_width}），看句子的方式也就各不相同。最后把各头的输出 {split} 重新并排，还原成 {flat}。",
)
HEAD = Words("head {head}", "头 {head}")
MERGED = Words("output of both heads", "两个头的输出")
CAUSAL = Words("Causal mask", "因果掩码")
CAUSAL_TEXT = Words(
    "A token may look at itself and at what stands before it, for a model that writes must not see what it has "
    "yet to write. Where the mask hides (·) the score becomes −∞, so the weight becomes 0.",
    "每个词元只能看自己和前面的词元：写作中的模型不能偷看还没写出来的内容。被遮住的位置（·）分数变成 −∞，"
    "权重就成了 0。",
)
PADDING = Words("Padding mask", "填充掩码")
PADDING_TEXT = Words(
    "Sentences of a batch are filled up to one length. Were the last {count} tokens such padding, no row might "
    "look at them; the other weights of a row still sum to 1.",
    "同一批里的句子要补齐到同样的长度。假如最后 {count} 个词元是补上去的，任何一行都不能看它们；其余的权重之和仍为 1。",
)
SUMMARY = Words("To keep in mind", "记住三点")
SUMMARY_POINTS = (
    Words(
        "What goes in and what comes out have the same shape, {shape}.",
        "输入和输出形状相同，都是 {shape}。",
    ),
    Words(
        "In between stands an (L, L) matrix, here {square}. attn_ext.attention computes with it tile by tile and "
        "does not store it, unless one asks for the weights.",
        "中间有一个 (L, L) 的矩阵，这里是 {square}。attn_ext.attention 分块计算，"
        "除非要求返回权重，否则不会把它整个存下来。",
    ),
    Words(
        "It is all matrix products: X by the W, Q by Kᵀ, weights by V. Only softmax is not.",
        "全是矩阵乘法：X 乘 W，Q 乘 Kᵀ，weights 乘 V；只有 softmax 不是。",
    ),
)
