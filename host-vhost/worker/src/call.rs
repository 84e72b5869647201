//! The calls, by noun.

pub mod event;
pub mod memory;
pub mod open;
pub mod process;
pub mod queue;
pub mod render;
pub mod smi;
pub mod topology;

use virtio_kfd_protocol::{CallType, Handle, Status};

use crate::failure::Failure;

/// A call's answer.
pub struct Reply<C: CallType> {
    /// The fixed part.
    pub fixed: C::Answer,
    /// The tail.
    pub tail: Vec<C::AnswerTail>,
    /// The answer itself says that the call failed part way: what follows in the frame is not run.
    pub failed: bool,
}

impl<C: CallType> Reply<C> {
    /// An answer without a tail.
    pub fn of(fixed: C::Answer) -> Self {
        Reply { fixed, tail: Vec::new(), failed: false }
    }

    /// An answer with a tail.
    pub fn with(fixed: C::Answer, tail: Vec<C::AnswerTail>) -> Self {
        Reply { fixed, tail, failed: false }
    }
}

/// What a call comes to.
pub type Outcome<C> = Result<Reply<C>, Failure>;

/// The buffers that the requests of one frame made so far, by request number.
#[derive(Debug, Default)]
pub struct Made {
    handles: Vec<Handle>,
}

impl Made {
    /// The next request made this buffer, or none ([`Handle::NONE`]).
    pub fn push(&mut self, handle: Handle) {
        self.handles.push(handle);
    }

    /// A handle as the worker knows it: a reference to a request of the same frame becomes what that request made.
    pub fn resolve(&self, handle: Handle) -> Result<Handle, Failure> {
        if handle.generation() != Handle::IN_FRAME {
            return Ok(handle);
        }
        let made = self.handles.get(handle.index() as usize).filter(|made| !made.is_none());
        made.copied().ok_or_else(|| {
            let reason = format!("request {} of this frame made no buffer before this one", handle.index());
            Failure::new(Status::BAD_HANDLE, reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_reach_only_earlier_requests_that_made_a_buffer() {
        let mut made = Made::default();
        made.push(Handle::NONE);
        made.push(Handle::new(4, 9));
        assert_eq!(made.resolve(Handle::in_frame(1)), Ok(Handle::new(4, 9)));
        assert_eq!(made.resolve(Handle::new(7, 3)), Ok(Handle::new(7, 3)));
        for request in [0, 2, u32::MAX] {
            let failure = made.resolve(Handle::in_frame(request)).unwrap_err();
            assert_eq!(failure.status, Status::BAD_HANDLE, "{request}");
        }
    }
}
