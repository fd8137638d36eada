# add_test_groups(PROGRAM [FIRST GROUP...] [EXCEPT GROUP...]): a ctest test for each group of a test program, so that
# ctest --parallel has something to share out. FIRST names the longest groups, longest first: what starts last must not
# be what takes longest. EXCEPT names groups that are not to run.
#
# ctest asks the program for its groups (--list) whenever it starts: see ctest_groups.cmake.
set(ATTN_EXT_CTEST_GROUPS ${CMAKE_CURRENT_LIST_DIR}/ctest_groups.cmake)

function(add_test_groups program)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FIRST;EXCEPT")
  set(emulator)
  if(CMAKE_CROSSCOMPILING)
    set(emulator ${CMAKE_CROSSCOMPILING_EMULATOR})
  endif()
  set(command ${emulator} $<TARGET_FILE:${program}>)
  string(REGEX REPLACE "_tests$" "" prefix ${program})
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${program}_groups.cmake)
  file(GENERATE OUTPUT ${file} CONTENT "\
set(prefix \"${prefix}\")
set(command \"${command}\")
set(first \"${arg_FIRST}\")
set(except \"${arg_EXCEPT}\")
include(\"${ATTN_EXT_CTEST_GROUPS}\")
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file})
endfunction()
