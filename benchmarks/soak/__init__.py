"""Many clients at every door, whose connections break at any byte: every bit is checked, memory must stay flat."""
