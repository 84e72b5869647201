//! A workgroup: its waves, LDS and barrier.
