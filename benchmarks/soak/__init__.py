"""Many clients at every protocol, whose connections break at any byte: every bit is checked, memory must stay flat."""
