//! How the processes of wild kernels end. What they print is ROCr's and HIP's: ROCr aborts the process after a message
//! (`Runtime::VMFaultHandler`, and the queue's error callback of HIP), which names HSA's status.

/// What wild.hip is told, and what is said when it is aborted.
pub const ABORTED: &[(&str, &str)] = &[
    ("store", "Memory access fault by GPU node-1"),
    ("load", "on address 0x10000. Reason: Page not present"),
    ("illegal", "HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION"),
    ("trap", "HSA_STATUS_ERROR_EXCEPTION"),
    ("overflow", "Memory access fault by GPU node-1"),
];

/// What it prints when HIP refuses a workgroup of 2048 x 2 x 2 work-items, before its status 1.
pub const ABSURD: &str = "absurd\nlaunch hipErrorInvalidValue, end hipSuccess\nresults: none\n";

/// What the neighbour prints.
pub const KEPT: &str = "at work\nall rounds right\n";
