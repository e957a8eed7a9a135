"""The chunk executor without ROS: pure, clock-injected, numpy only. The way in is `executor`."""
