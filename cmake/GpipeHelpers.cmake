# gpipe_program(name [LIGHT] SOURCES file... LIBRARIES target...): a program, with the precompiled torch.h. LIGHT leaves
# that out: loading it costs two seconds a file, which those with few torch headers do not win back.
function(gpipe_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "LIGHT" "" "SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} gpipe::gpipe)
  if(NOT arg_LIGHT)
    target_precompile_headers(${name} REUSE_FROM gpipe_pipeline)
  endif()
endfunction()

# gpipe_test(name TIMEOUT seconds [LIGHT] SOURCES file... LIBRARIES target...): such a program made of GoogleTest tests.
# It is one test to ctest, because each start loads libtorch.
function(gpipe_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "")
  gpipe_program(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE gpipe_abseil GTest::gmock_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT})
endfunction()
