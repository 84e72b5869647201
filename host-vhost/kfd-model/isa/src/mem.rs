//! Memory instructions and the memory that they reach.
