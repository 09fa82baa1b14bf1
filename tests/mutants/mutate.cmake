# cmake -DFROM=source -DTO=copy -DTEXT=... -DINSTEAD=... -P mutate.cmake
#
# Copies a source with another text in one place. An error unless the text is there exactly once.
file(READ ${FROM} source)
string(REPLACE "${TEXT}" "" rest "${source}")
foreach(part IN ITEMS source rest TEXT)
  string(LENGTH "${${part}}" ${part}_length)
endforeach()
math(EXPR removed "${source_length} - ${rest_length}")
if(NOT removed EQUAL TEXT_length)
  message(FATAL_ERROR "${FROM} should have this exactly once, to make a mutant of it:\n${TEXT}")
endif()
string(REPLACE "${TEXT}" "${INSTEAD}" mutant "${source}")
file(WRITE ${TO} "${mutant}")
