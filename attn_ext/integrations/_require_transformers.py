"""Imported before anything of transformers: says in one sentence what is missing."""

MINIMUM = "5.18"  # the oldest transformers that the integration works with
_WHO = "attn_ext.integrations.transformers"

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(f"{_WHO} needs transformers ≥ {MINIMUM}: pip install 'attn_ext[hf]'") from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


if _numbers(transformers.__version__) < _numbers(MINIMUM):
    raise ImportError(
        f"{_WHO} needs transformers ≥ {MINIMUM}, but {transformers.__version__} is installed: "
        f"pip install -U 'transformers>={MINIMUM}'"
    )
