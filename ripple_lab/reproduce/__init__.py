"""The paper's tables and figures again: its numbers beside ours, and what is not yet measured."""
