# Included after project() where ROS 2 is that of the package index (./run): its wheels name the
# folders of Python on the machine that built them, which CMake refuses where there are none.

function(_forget_missing_folders)
  get_property(targets DIRECTORY PROPERTY IMPORTED_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
    set(there "")
    foreach(folder IN LISTS folders)
      if(EXISTS "${folder}" OR "${folder}" MATCHES "[$]<")
        list(APPEND there "${folder}")
      endif()
    endforeach()
    set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${there}")
  endforeach()
endfunction()

cmake_language(DEFER CALL _forget_missing_folders)
