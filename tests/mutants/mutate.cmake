# cmake -DFROM=source -DTO=copy -DTEXT=... -DINSTEAD=... -P mutate.cmake
#
# Copies a source file and replaces TEXT, which must occur exactly once, with INSTEAD.
file(READ ${FROM} source)
string(REPLACE "${TEXT}" "" rest "${source}")
foreach(part IN ITEMS source rest TEXT)
  string(LENGTH "${${part}}" ${part}_length)
endforeach()
math(EXPR removed "${source_length} - ${rest_length}")
if(NOT removed EQUAL TEXT_length)
  message(FATAL_ERROR "To make a mutant of ${FROM}, this text must occur in it exactly once:\n${TEXT}")
endif()
string(REPLACE "${TEXT}" "${INSTEAD}" mutant "${source}")
file(WRITE ${TO} "${mutant}")
