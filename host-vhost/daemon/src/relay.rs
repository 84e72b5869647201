//! Passes vhost-user messages and their descriptors from one stream socket to another, both ways.
//!
//! Descriptors have to arrive with the first byte of their message, and a read that goes over into the next message may
//! bring that one's, so messages are read one by one. Nothing but their length is looked at.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Most descriptors in a message: a vhost-user memory table has up to 8, and the limit of the crate is 32.
const MAX_DESCRIPTORS: usize = 32;

/// Request, flags and size, 4 bytes each (vhost-user specification, "Header").
const HEADER_BYTES: usize = 12;

/// Largest payload: the largest message so far has about 2 KiB.
const MAX_PAYLOAD: usize = 64 * 1024;

/// Passes everything on until either side closes.
pub fn start(a: UnixStream, b: UnixStream) -> std::io::Result<()> {
    let (a2, b2) = (a.try_clone()?, b.try_clone()?);
    let run = |from: UnixStream, to: UnixStream| {
        move || {
            if let Err(error) = pass(&from, &to) {
                tracing::debug!("relay: {error}");
            }
            // The other direction ends too, and so do both peers. Either may be closed already.
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        }
    };
    std::thread::Builder::new().name("relay-in".into()).spawn(run(a, b))?;
    std::thread::Builder::new().name("relay-out".into()).spawn(run(b2, a2))?;
    Ok(())
}

fn pass(from: &UnixStream, to: &UnixStream) -> Result<(), Errno> {
    loop {
        let mut descriptors = Vec::new();
        let mut message = vec![0; HEADER_BYTES];
        if !fill(from, &mut message, &mut descriptors)? {
            return Ok(());
        }
        let size = message.last_chunk().map_or(0, |size| u32::from_le_bytes(*size)) as usize;
        if size > MAX_PAYLOAD {
            return Err(Errno::MSGSIZE);
        }
        message.resize(HEADER_BYTES.saturating_add(size), 0);
        let payload = message.get_mut(HEADER_BYTES..).unwrap_or(&mut []);
        if !fill(from, payload, &mut descriptors)? {
            return Ok(());
        }
        let mut rest = message.as_slice();
        while !rest.is_empty() {
            let sent = send(to, rest, &descriptors)?;
            descriptors.clear();
            rest = rest.get(sent..).unwrap_or(&[]);
        }
    }
}

/// Fills `bytes` and collects the descriptors beside them. `false` if the peer closed before.
fn fill(from: &UnixStream, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<bool, Errno> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            match recvmsg(from, &mut [IoSliceMut::new(rest)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == 0 => return Ok(false),
                Ok(message) => message.bytes,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        rest = rest.get_mut(received..).unwrap_or(&mut []);
    }
    Ok(true)
}

fn send(to: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) -> Result<usize, Errno> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        match sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn message(payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![5, 0, 0, 0, 1, 0, 0, 0];
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn messages_and_descriptors_come_through_together_and_the_end_too() {
        let (vmm, outer) = UnixStream::pair().unwrap();
        let (inner, device) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"ram").unwrap();
        // Before anything is read, so that both lie in the socket; the descriptor belongs to the second.
        send(&vmm, &message(b""), &[]).unwrap();
        send(&vmm, &message(b"table"), &[file.into()]).unwrap();
        start(outer, inner).unwrap();

        let mut descriptors = Vec::new();
        let mut first = vec![0; HEADER_BYTES];
        assert!(fill(&device, &mut first, &mut descriptors).unwrap());
        assert_eq!((first, descriptors.len()), (message(b""), 0));
        let mut second = vec![0; HEADER_BYTES + 5];
        assert!(fill(&device, &mut second, &mut descriptors).unwrap());
        assert_eq!((second, descriptors.len()), (message(b"table"), 1));
        let file = std::fs::File::from(descriptors.pop().unwrap());
        assert_eq!(file.metadata().unwrap().len(), 3);

        (&device).write_all(&message(b"reply")).unwrap();
        let mut reply = vec![0; HEADER_BYTES + 5];
        (&vmm).read_exact(&mut reply).unwrap();
        assert_eq!(reply, message(b"reply"));
        drop(vmm);
        assert_eq!((&device).read(&mut reply).unwrap(), 0);
    }

    #[test]
    fn an_absurd_length_ends_both_connections() {
        let (vmm, outer) = UnixStream::pair().unwrap();
        let (inner, device) = UnixStream::pair().unwrap();
        start(outer, inner).unwrap();
        (&vmm).write_all(&[0xff; HEADER_BYTES]).unwrap();
        assert_eq!((&device).read(&mut [0; 8]).unwrap(), 0);
        assert_eq!((&vmm).read(&mut [0; 8]).unwrap(), 0);
    }
}
