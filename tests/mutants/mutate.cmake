# cmake -DFROM=source -DTO=copy -DTEXT=... -DINSTEAD=... -P mutate.cmake
#
# Copies a source file and replaces TEXT, which must occur exactly once, with INSTEAD.
file(READ ${FROM} source)
string(FIND "${source}" "${TEXT}" first)
string(FIND "${source}" "${TEXT}" last REVERSE)
if(first EQUAL -1 OR NOT first EQUAL last)
  message(FATAL_ERROR "To make a mutant of ${FROM}, this text must occur in it exactly once:\n${TEXT}")
endif()
string(REPLACE "${TEXT}" "${INSTEAD}" mutant "${source}")
file(WRITE ${TO} "${mutant}")
