"""Warnings of the package's other rooms, and of libraries, in the ROS log."""

from __future__ import annotations

import logging

from rclpy.impl.rcutils_logger import RcutilsLogger


class RosLogHandler(logging.Handler):
    """Hands what Python's `logging` gets, from WARNING on, to a node's logger.

    Args:
        logger: the node's logger.
    """

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, with its trace if it has one."""
        text = self.format(record)
        # A line each: rclpy refuses another severity from the same line.
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        else:
            self._logger.warning(text)
