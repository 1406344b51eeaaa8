# Writes OUTPUT, a header that defines MXFLASH_COMMIT: the commit of SOURCE_DIR, "+dirty" if tracked files differ from
# it, "unknown" if it is not the top of a git work tree. Runs in every build, so that the text is never stale; an
# unchanged header is not touched.
set(commit unknown)
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE_DIR} rev-parse --show-prefix
                  OUTPUT_VARIABLE prefix RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed AND prefix STREQUAL "")
    execute_process(COMMAND ${git} -C ${SOURCE_DIR} describe --always --exclude=* --abbrev=12 --dirty=+dirty
                    OUTPUT_VARIABLE described RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed)
      set(commit ${described})
    endif()
  endif()
endif()
set(text "#define MXFLASH_COMMIT \"${commit}\"\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
