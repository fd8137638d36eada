# Run by ctest, not by CMake: a test for each group that the program names, so that a new group is there without being
# entered anywhere and none can be forgotten. A program that does not answer, and a name that is no group's, fail.
#
# ATTN_EXT_TEST_UNDER in ctest's environment is a command to run the program under: "qemu-x86_64 -cpu Nehalem".
cmake_minimum_required(VERSION 3.22)

separate_arguments(under UNIX_COMMAND "$ENV{ATTN_EXT_TEST_UNDER}")
set(command ${under} ${command})

execute_process(COMMAND ${command} --list OUTPUT_VARIABLE groups RESULT_VARIABLE status)
string(REGEX MATCHALL "[^\n]+" groups "${groups}")
if(NOT status EQUAL 0 OR NOT groups)
  add_test(${prefix}_list ${command} --list)
  set_tests_properties(${prefix}_list PROPERTIES FAIL_REGULAR_EXPRESSION ".*") # also where it answers nothing
  return()
endif()

set(wanted ${first} ${groups})
list(REMOVE_DUPLICATES wanted)
foreach(group IN LISTS except)
  if(group IN_LIST groups)
    list(REMOVE_ITEM wanted ${group})
  else()
    list(APPEND wanted ${group}) # which the program refuses
  endif()
endforeach()

list(LENGTH wanted cost) # ctest starts what costs most first
foreach(group IN LISTS wanted)
  add_test(${prefix}_${group} ${command} ${group})
  set_tests_properties(${prefix}_${group} PROPERTIES TIMEOUT 1500 COST ${cost})
  math(EXPR cost "${cost} - 1")
endforeach()
