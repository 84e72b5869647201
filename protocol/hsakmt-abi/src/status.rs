//! What every call returns.

use crate::bits::abi_enums;

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// The result of a call.
    #[must_use]
    enum HsakmtStatus: u32 = "HSAKMT_STATUS", "HSAKMT_STATUS_" {
        /// Done.
        SUCCESS = 0;
        /// Failed for some other reason.
        ERROR = 1;
        /// The kernel's interface is not the library's.
        DRIVER_MISMATCH = 2;
        /// An argument is not valid.
        INVALID_PARAMETER = 3;
        /// A handle is not valid.
        INVALID_HANDLE = 4;
        /// No such node.
        INVALID_NODE_UNIT = 5;
        /// Out of memory.
        NO_MEMORY = 6;
        /// A buffer of the caller is too small.
        BUFFER_TOO_SMALL = 7;
        /// The function is not there.
        NOT_IMPLEMENTED = 10;
        /// The node cannot do it.
        NOT_SUPPORTED = 11;
        /// The node cannot do it now.
        UNAVAILABLE = 12;
        /// More was asked for than there is now.
        OUT_OF_RESOURCES = 13;
        /// `hsaKmtOpenKFD` was not called or failed.
        KERNEL_IO_CHANNEL_NOT_OPENED = 20;
        /// A call to the kernel failed.
        KERNEL_COMMUNICATION_ERROR = 21;
        /// `hsaKmtOpenKFD` was called before; the reference counts.
        KERNEL_ALREADY_OPENED = 22;
        /// No address translation service.
        HSAMMU_UNAVAILABLE = 23;
        /// A wait failed.
        WAIT_FAILURE = 30;
        /// A wait's time was up.
        WAIT_TIMEOUT = 31;
        /// The memory is registered.
        MEMORY_ALREADY_REGISTERED = 35;
        /// The memory is not registered.
        MEMORY_NOT_REGISTERED = 36;
        /// An address or size is not aligned.
        MEMORY_ALIGNMENT = 37;
    }
}

impl core::fmt::Display for HsakmtStatus {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "HSAKMT_STATUS {}", self.0),
        }
    }
}

impl core::error::Error for HsakmtStatus {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(HsakmtStatus::WAIT_TIMEOUT.to_string(), "HSAKMT_STATUS_WAIT_TIMEOUT");
        assert_eq!(HsakmtStatus(99).to_string(), "HSAKMT_STATUS 99");
    }
}
