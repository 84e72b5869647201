//! One end of a socket pair that carries whole messages with descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, recvmsg,
    sendmsg, shutdown, socketpair,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most bytes of a message: the largest frame or answer and its envelope.
pub const MAX_MESSAGE_BYTES: usize = virtio_kfd_protocol::limits::MAX_FRAME_BYTES + 4096;

/// Most descriptors beside a message.
pub const MAX_DESCRIPTORS: usize = 2;

/// Why a message did not go through.
#[derive(Debug, Error)]
pub enum IpcError {
    /// The other process is gone.
    #[error("ipc: the other side has closed the channel")]
    Closed,
    /// A system call failed.
    #[error("ipc: {call}: {errno}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The message does not fit in a datagram.
    #[error("ipc: a message of {found} bytes is over the limit of {MAX_MESSAGE_BYTES}")]
    TooLarge {
        /// Its size.
        found: usize,
    },
    /// There is no room for that many descriptors.
    #[error("ipc: a message with {found} descriptors, at most {MAX_DESCRIPTORS} can be sent")]
    TooManyDescriptors {
        /// Their number.
        found: usize,
    },
    /// The bytes are not a message.
    #[error("ipc: message of {bytes} bytes cannot be read: {error}")]
    Decode {
        /// Bytes that came.
        bytes: usize,
        /// Why.
        error: postcard::Error,
    },
    /// The message cannot be written down.
    #[error("ipc: message cannot be encoded: {0}")]
    Encode(postcard::Error),
}

/// One end of a channel. Sending and receiving are atomic for each message, so several threads may send, and one
/// may receive meanwhile.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Makes a connected pair, both ends close-on-exec.
    pub fn pair() -> Result<(Channel, Channel), IpcError> {
        let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|errno| IpcError::System { call: "socketpair", errno })?;
        Ok((Channel { socket: a }, Channel { socket: b }))
    }

    /// Sends a message with at most [`MAX_DESCRIPTORS`] descriptors beside it. Blocks while the other side's buffer is
    /// full.
    pub fn send<M: Serialize>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<(), IpcError> {
        let bytes = postcard::to_stdvec(message).map_err(IpcError::Encode)?;
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(IpcError::TooLarge { found: bytes.len() });
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(IpcError::TooManyDescriptors { found: descriptors.len() });
        }
        let raw: Vec<i32> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[] } else { rights.as_slice() };
        loop {
            match sendmsg::<()>(
                self.socket.as_raw_fd(),
                &[IoSlice::new(&bytes)],
                control,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(IpcError::Closed),
                Err(errno) => return Err(IpcError::System { call: "sendmsg", errno }),
            }
        }
    }

    /// Receives a message into `buffer` (of [`MAX_MESSAGE_BYTES`]), from which the message may borrow, and the
    /// descriptors beside it in their order. Blocks until there is one; [`IpcError::Closed`] when the other side is gone.
    pub fn receive<'b, M: Deserialize<'b>>(
        &self,
        buffer: &'b mut [u8],
    ) -> Result<(M, Vec<OwnedFd>), IpcError> {
        let (length, descriptors) = self.receive_bytes(buffer)?;
        if length == 0 {
            return Err(IpcError::Closed);
        }
        let bytes = buffer.get(..length).unwrap_or(&[]);
        let message =
            postcard::from_bytes(bytes).map_err(|error| IpcError::Decode { bytes: bytes.len(), error })?;
        Ok((message, descriptors))
    }

    fn receive_bytes(&self, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), IpcError> {
        loop {
            let mut control = cmsg_space!([i32; MAX_DESCRIPTORS]);
            let mut slices = [IoSliceMut::new(buffer)];
            let message = match recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut slices,
                Some(&mut control),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Ok(message) => message,
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) => return Err(IpcError::Closed),
                Err(errno) => return Err(IpcError::System { call: "recvmsg", errno }),
            };
            let mut descriptors = Vec::new();
            let controls = message.cmsgs().map_err(|errno| IpcError::System { call: "recvmsg", errno })?;
            for control in controls {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    descriptors.extend(fds.into_iter().map(own));
                }
            }
            return Ok((message.bytes, descriptors));
        }
    }

    /// Ends the channel in both directions: a blocked [`Channel::receive`] on either side returns
    /// [`IpcError::Closed`].
    pub fn shut_down(&self) {
        // Fails only if the other side is gone already, which is what is asked for.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

/// Takes over a descriptor that `SCM_RIGHTS` brought.
#[allow(unsafe_code)] // recvmsg hands out plain numbers; there is no safe way to take them over
fn own(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just installed this descriptor in our table for this message, and each number of the
    // control message is taken exactly once, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Self {
        Channel { socket }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;
    use crate::worker::{FromWorker, ToWorker};

    #[test]
    fn the_largest_frame_fits_in_a_datagram() {
        let (a, b) = Channel::pair().unwrap();
        let frame = vec![7u8; virtio_kfd_protocol::limits::MAX_FRAME_BYTES];
        let sender = std::thread::spawn(move || {
            a.send(&ToWorker::Frame { ring: 3, ticket: 9, bytes: &frame }, &[]).unwrap();
        });
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let (message, descriptors) = b.receive::<ToWorker>(&mut buffer).unwrap();
        assert!(descriptors.is_empty());
        match message {
            ToWorker::Frame { ring: 3, ticket: 9, bytes } => {
                assert_eq!(bytes.len(), virtio_kfd_protocol::limits::MAX_FRAME_BYTES);
            }
            other => panic!("{other:?}"),
        }
        sender.join().unwrap();
        assert!(matches!(b.receive::<ToWorker>(&mut buffer), Err(IpcError::Closed)));
    }

    #[test]
    fn descriptors_travel_in_their_order_and_show_the_same_files() {
        let (a, b) = Channel::pair().unwrap();
        let file = |text: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text).unwrap();
            file
        };
        let (first, second) = (file(b"guest memory"), file(b"a dma-buf"));
        let message = ToWorker::AddRegion { region: 1, file_offset: 0, size: 12 };
        a.send(&message, &[first.as_fd(), second.as_fd()]).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let (_, descriptors) = b.receive::<ToWorker>(&mut buffer).unwrap();
        let texts: Vec<String> = descriptors
            .into_iter()
            .map(|descriptor| {
                let mut copy = std::fs::File::from(descriptor);
                copy.rewind().unwrap();
                let mut text = String::new();
                copy.read_to_string(&mut text).unwrap();
                text
            })
            .collect();
        assert_eq!(texts, ["guest memory", "a dma-buf"]);
        let error = a.send(&message, &[first.as_fd(); 3]).unwrap_err();
        assert!(matches!(error, IpcError::TooManyDescriptors { found: 3 }), "{error}");
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let (a, b) = Channel::pair().unwrap();
        a.send(&vec![0xffu8; 40], &[]).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        assert!(matches!(b.receive::<FromWorker>(&mut buffer), Err(IpcError::Decode { .. })));
    }

    #[test]
    fn shutting_down_wakes_a_blocked_receiver() {
        let (a, b) = Channel::pair().unwrap();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let mut buffer = vec![0; MAX_MESSAGE_BYTES];
                b.receive::<FromWorker>(&mut buffer).map(|_| ()).unwrap_err()
            });
            a.shut_down();
            assert!(matches!(receiver.join().unwrap(), IpcError::Closed));
        });
    }
}
