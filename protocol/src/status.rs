//! How a request ended.

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Status of one request. An open set: an unknown value is kept as it is and counts as a failure.
/// Numbers are never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status($value);)*

            /// Every known status with its name and meaning, for the generated protocol page.
            pub const ALL: &'static [(Status, &'static str, &'static str)] =
                &[$((Status($value), stringify!($name), $text),)*];
        }
    };
}

statuses! {
    /// Done.
    OK = 0, "done";
    /// The kernel (or the model) refused; the record's `errno` says how.
    ERRNO = 1, "the kernel refused: see errno";
    /// A field has a value that the call does not allow.
    INVALID = 2, "a field has a value that the call does not allow";
    /// The call number is not known to this host.
    UNKNOWN_CALL = 3, "the host does not know this call number";
    /// Known, but not written yet.
    NOT_IMPLEMENTED = 4, "known, but not implemented yet";
    /// This host, kernel or GPU cannot do it.
    NOT_SUPPORTED = 5, "this host, kernel or GPU cannot do it";
    /// The handle names nothing, or something that is gone.
    BAD_HANDLE = 6, "the handle names nothing, or something that is gone";
    /// The GPU was not given to this VM.
    NO_SUCH_GPU = 7, "no GPU with this id was given to this VM";
    /// The blob resource is not known to this context, or too small.
    BAD_RESOURCE = 8, "the blob is not known to this context, or too small";
    /// A limit that the host sets for this VM or this process is reached.
    LIMIT = 9, "a limit set on the host for this VM or process is reached";
    /// Not run, since an earlier request of the same frame failed.
    NOT_RUN = 10, "an earlier request of the frame failed";
    /// The worker of this context has ended: nothing of the context works any more.
    WORKER_LOST = 11, "the worker of this context has ended";
    /// The handshake has not happened, or its version is outside the range.
    HANDSHAKE = 12, "no handshake yet, or no version in common";
    /// This call may not be sent on this ring (blocking calls need a ring of their own).
    WRONG_RING = 13, "this call may not be sent on this ring";
}

impl Status {
    /// Whether the request was done.
    pub const fn is_ok(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::ALL.iter().find(|(status, _, _)| status == self) {
            Some((_, name, text)) => write!(f, "{name} ({text})"),
            None => write!(f, "unknown status {}", self.0),
        }
    }
}
