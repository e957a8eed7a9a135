"""GR00T N1.5, N1.6 and N1.7, from folders of NVIDIA's and of LeRobot's."""

from vla_convert.readers.groot.checkpoint import READER as READER
