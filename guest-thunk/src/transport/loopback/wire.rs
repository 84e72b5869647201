//! What guest processes and the process that keeps their VM say to each other: messages of a `SOCK_SEQPACKET` Unix socket, each with
//! at most one descriptor. A request is answered by one reply, on the same socket, before the next one is read.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use virtio_kfd_protocol::limits::MAX_FRAME_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What both sides must have in common. Another number is refused at the greeting.
pub(super) const VERSION: u64 = 1;

/// Most bytes of a message behind its head.
pub(super) const MOST_PAYLOAD: usize = MAX_FRAME_BYTES;

/// Most bytes of an error's sentence.
pub(super) const MOST_SENTENCE: usize = 2048;

/// Bytes of the longer head.
pub(super) const MOST_HEAD: usize = size_of::<Reply>();

/// Most runs of memory that a reply carries; more are asked for.
pub(super) const MOST_RUNS: usize = 4096;
const _: () = assert!(MOST_RUNS * size_of::<Run>() <= MOST_PAYLOAD);

/// What is asked.
pub(super) mod call {
    /// `first`: the version. Makes the context. Reply: the guest's memory as a descriptor, the capset behind the head.
    pub(in super::super) const GREET: u32 = 1;
    /// With the end of a socket pair, whose other end then takes [`SUBMIT`].
    pub(in super::super) const CHANNEL: u32 = 2;
    /// `ring`; `first`: the longest wait in nanoseconds; the frame behind the head. Replied to when the fence has completed.
    pub(in super::super) const SUBMIT: u32 = 3;
    /// `first`: bytes. Reply: see [`super::Reply`].
    pub(in super::super) const GUEST_BLOB: u32 = 4;
    /// `first`: the blob id; `second`: bytes; `ring`: 1 if it is to be mappable. Reply as for a guest blob.
    pub(in super::super) const HOST_BLOB: u32 = 5;
    /// With a dma-buf. Reply as for a guest blob.
    pub(in super::super) const IMPORT: u32 = 6;
    /// `first`: the blob's key; `second`: the first run that is wanted. Reply: runs behind the head.
    pub(in super::super) const RUNS: u32 = 7;
    /// `first`: the key of a host blob. Reply: the file as a descriptor, `first`: where in it, `second`: bytes, `third`: 1 if it
    /// can be written.
    pub(in super::super) const SHOWN: u32 = 8;
    /// `first`: the key. Reply: a dma-buf.
    pub(in super::super) const EXPORT: u32 = 9;
    /// `first`: the key. Reply: `first`: where `mmap` of the device's file shows the blob.
    pub(in super::super) const OFFSET: u32 = 10;
    /// Reply: the device's file as a descriptor.
    pub(in super::super) const DEVICE: u32 = 11;
    /// `first`: the key of a blob that leaves the context and keeps its memory.
    pub(in super::super) const CLOSE_HANDLE: u32 = 12;
    /// `first`: the key of a blob that goes.
    pub(in super::super) const DROP: u32 = 13;
}

/// The head of a request.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Request {
    /// [`call`]
    pub(super) call: u32,
    pub(super) ring: u32,
    pub(super) first: u64,
    pub(super) second: u64,
}

/// How a request ended.
pub(super) mod status {
    /// Well.
    pub(in super::super) const OK: u32 = 0;
    /// With an error, its sentence behind the head.
    pub(in super::super) const FAILED: u32 = 1;
    /// The device is gone, or has ended the context; the sentence behind the head.
    pub(in super::super) const LOST: u32 = 2;
}

/// The head of a reply. For a new blob `first` is its key, `second` its resource id, `third` its bytes; behind the head are the
/// runs of a guest blob, the first [`MOST_RUNS`] of them.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Reply {
    /// [`status`]
    pub(super) status: u32,
    pub(super) errno: i32,
    pub(super) first: u64,
    pub(super) second: u64,
    pub(super) third: u64,
}

/// A run of memory in the file of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Run {
    /// Where in the file, in bytes.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) length: u64,
}

/// A message that was received.
pub(super) struct Message<H> {
    pub(super) head: H,
    pub(super) payload: Vec<u8>,
    pub(super) descriptor: Option<OwnedFd>,
}

/// Sends a request. Signals that interrupt it are sent through.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    head: &Request,
    payload: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    transmit(socket, head, payload, descriptor, SendFlags::empty())
}

/// Sends the reply to the only request that has none yet. There is room for it unless the other side leaves replies unread, which
/// is an error: nobody waits for it.
pub(super) fn reply(
    socket: BorrowedFd<'_>,
    head: &Reply,
    payload: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    transmit(socket, head, payload, descriptor, SendFlags::DONTWAIT)
}

fn transmit<H: IntoBytes + Immutable>(
    socket: BorrowedFd<'_>,
    head: &H,
    payload: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> io::Result<()> {
    let parts = [IoSlice::new(head.as_bytes()), IoSlice::new(payload)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let list = descriptor.map(|descriptor| [descriptor]);
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(list) = &list
            && !control.push(SendAncillaryMessage::ScmRights(list))
        {
            return Err(io::Error::other("no room for a descriptor"));
        }
        match sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL | flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Room for any message.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; MOST_HEAD.saturating_add(MOST_PAYLOAD)]
}

/// Receives a message; none when the other side has closed its end. Without a deadline it waits for ever. A message that
/// the buffer is too short for is an error.
pub(super) fn receive<H: FromBytes + KnownLayout + Immutable>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    deadline: Option<Instant>,
) -> io::Result<Option<Message<H>>> {
    loop {
        if let Some(deadline) = deadline {
            wait(socket, deadline)?;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(buffer)];
        let received = match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                descriptors.extend(list);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        let bytes = buffer.get(..received.bytes).unwrap_or_default();
        let parsed = H::read_from_prefix(bytes).ok().filter(|_| !received.flags.contains(ReturnFlags::TRUNC));
        let Some((head, payload)) = parsed else {
            let what = format!("a message of {} bytes", received.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        return Ok(Some(Message { head, payload: payload.to_vec(), descriptor: descriptors.pop() }));
    }
}

/// Waits until there is something to read.
fn wait(socket: BorrowedFd<'_>, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn nobody_waits_for_a_side_that_leaves_replies_unread() {
        let (one, other) = pair();
        let mut sent = 0;
        let error = loop {
            match reply(one.as_fd(), &Reply::default(), &[7; 100], None) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let mut buffer = buffer();
        for _ in 0..sent {
            assert_eq!(
                receive::<Reply>(other.as_fd(), &mut buffer, None).unwrap().unwrap().payload,
                [7; 100]
            );
        }
        reply(one.as_fd(), &Reply::default(), &[], Some(one.as_fd())).unwrap();
    }

    #[test]
    fn a_message_arrives_as_it_was_sent_and_what_is_none_is_told() {
        let (one, other) = pair();
        let mut buffer = buffer();
        let frame = vec![7; MOST_PAYLOAD];
        let request = Request { call: call::SUBMIT, ring: 5, first: 1, second: 2 };
        send(one.as_fd(), &request, &frame, Some(one.as_fd())).unwrap();
        let message = receive::<Request>(other.as_fd(), &mut buffer, None).unwrap().unwrap();
        assert_eq!(message.head.as_bytes(), request.as_bytes());
        assert_eq!(message.payload, frame);
        // The descriptor is one of the same socket.
        rustix::io::write(message.descriptor.unwrap(), b"too short").unwrap();
        let error = receive::<Request>(other.as_fd(), &mut buffer, None).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        rustix::io::write(&one, &vec![1; MOST_HEAD + MOST_PAYLOAD + 1]).unwrap();
        let error = receive::<Request>(other.as_fd(), &mut buffer, None).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let error = receive::<Request>(other.as_fd(), &mut buffer, Some(Instant::now())).map(|_| ());
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(one);
        assert!(receive::<Request>(other.as_fd(), &mut buffer, None).unwrap().is_none());
    }
}
