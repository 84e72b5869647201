//! Passes bytes and descriptors from one stream socket to another, both ways.

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

/// Bytes passed at a time.
const BYTES: usize = 64 * 1024;

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
    let mut bytes = vec![0; BYTES];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            match recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == 0 => return Ok(()),
                Ok(message) => message.bytes,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        let mut rest = bytes.get(..received).unwrap_or(&[]);
        while !rest.is_empty() {
            let sent = send(to, rest, &descriptors)?;
            descriptors.clear();
            rest = rest.get(sent..).unwrap_or(&[]);
        }
    }
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

    #[test]
    fn bytes_and_descriptors_come_through_and_the_end_too() {
        let (vmm, outer) = UnixStream::pair().unwrap();
        let (inner, device) = UnixStream::pair().unwrap();
        start(outer, inner).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"ram").unwrap();
        send(&vmm, b"table", &[file.into()]).unwrap();

        let mut bytes = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            recvmsg(&device, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty()).unwrap();
        assert_eq!(&bytes[..got.bytes], b"table");
        let fds: Vec<OwnedFd> = control
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
                _ => vec![],
            })
            .collect();
        assert_eq!(std::fs::File::from(fds.into_iter().next().unwrap()).metadata().unwrap().len(), 3);

        (&device).write_all(b"reply").unwrap();
        (&vmm).read_exact(&mut bytes[..5]).unwrap();
        assert_eq!(&bytes[..5], b"reply");
        drop(vmm);
        assert_eq!((&device).read(&mut bytes).unwrap(), 0);
    }
}
