//! One guest process, from the side of the VM that it is in.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketType, shutdown, sockopt};
use zerocopy::IntoBytes;

use super::super::blob::{ContextBlob, Resource};
use super::super::wire::{self, MOST_RUNS, Message, Reply, Request, Run, call, status};
use super::super::{LoopbackContext, LoopbackVm, system};
use super::spawn;
use crate::transport::{Blob, Result, Transport, TransportError};

/// Most connections for waits that a guest process may have.
const MOST_CHANNELS: usize = 256;

/// Most blobs that a guest process may have.
const MOST_BLOBS: usize = 1 << 17;

/// What a guest process has by a key.
enum Held {
    Blob(Arc<ContextBlob>),
    /// One whose handle is closed: it only stays.
    Memory {
        _stays: Arc<Resource>,
    },
}

#[derive(Default)]
struct State {
    blobs: HashMap<u64, Held>,
    last: u64,
    channels: HashMap<u64, Arc<OwnedFd>>,
    ended: bool,
}

struct Guest {
    context: LoopbackContext,
    state: Mutex<State>,
}

/// What a request comes to.
#[derive(Default)]
struct Answer {
    reply: Reply,
    payload: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

/// Serves a guest process until it closes its connection.
///
/// # Errors
/// It said what is none of the language.
pub(super) fn serve(vm: &LoopbackVm, socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut buffer = wire::buffer();
    let Some(Message { head, .. }) = wire::receive::<Request>(socket, &mut buffer, None)? else {
        return Ok(());
    };
    let greeted = greet(vm, &head);
    let (context, answer) = match greeted {
        Ok((context, answer)) => (Some(context), Ok(answer)),
        Err(error) => (None, Err(error)),
    };
    // Made before the reply, so that the context ends in any case.
    let guest = context.map(|context| Arc::new(Guest { context, state: Mutex::default() }));
    let mut result = reply(socket, answer);
    if let Some(guest) = guest {
        if result.is_ok() {
            result = requests(socket, &mut buffer, |message| guest.control(message));
        }
        guest.end();
    }
    result
}

/// Answers requests until the other side closes its end.
fn requests(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    answer: impl Fn(Message<Request>) -> Result<Answer>,
) -> io::Result<()> {
    let mut served = || -> io::Result<()> {
        while let Some(message) = wire::receive(socket, buffer, None)? {
            reply(socket, answer(message))?;
        }
        Ok(())
    };
    match served() {
        // It has ended with replies that it did not read.
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => {
            Ok(())
        }
        other => other,
    }
}

fn reply(socket: BorrowedFd<'_>, answer: Result<Answer>) -> io::Result<()> {
    let answer = answer.unwrap_or_else(|error| {
        let errno = match &error {
            TransportError::System { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            TransportError::NotSupported(_) => libc::EOPNOTSUPP,
            TransportError::NoDevice(_) | TransportError::Handshake(_) => libc::ENODEV,
            TransportError::Lost(_) => libc::EIO,
        };
        let (status, sentence) = match error {
            TransportError::Lost(why) => (status::LOST, why),
            other => (status::FAILED, other.to_string()),
        };
        let reply = Reply { status, errno, ..Reply::default() };
        let mut payload = sentence.into_bytes();
        payload.truncate(wire::MOST_SENTENCE);
        Answer { reply, payload, descriptor: None }
    });
    wire::reply(socket, &answer.reply, &answer.payload, answer.descriptor.as_ref().map(OwnedFd::as_fd))
}

fn greet(vm: &LoopbackVm, head: &Request) -> Result<(LoopbackContext, Answer)> {
    if (head.call, head.first) != (call::GREET, wire::VERSION) {
        return Err(TransportError::NoDevice(format!(
            "a guest process greets with call {}, version {}; expected {}, {}",
            head.call,
            head.first,
            call::GREET,
            wire::VERSION
        )));
    }
    let context = vm.context()?;
    let memory = super::super::duplicate(vm.ram().file())?;
    let payload = context.capset().as_bytes().to_vec();
    Ok((context, Answer { payload, descriptor: Some(memory), ..Answer::default() }))
}

fn invalid(what: &'static str, code: i32) -> TransportError {
    system(what, "a guest process's request", io::Error::from_raw_os_error(code))
}

fn bytes_of_runs(blob: &ContextBlob, from: usize) -> Vec<u8> {
    let Some(pages) = blob.pages() else { return Vec::new() };
    let runs = pages.places().skip(from).take(MOST_RUNS);
    let runs: Vec<Run> = runs.map(|(offset, length)| Run { offset, length }).collect();
    runs.as_bytes().to_vec()
}

impl Guest {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What comes on the first connection.
    fn control(self: &Arc<Self>, message: Message<Request>) -> Result<Answer> {
        let Message { head, descriptor, .. } = message;
        let descriptor =
            || descriptor.ok_or_else(|| invalid("a request without its descriptor", libc::EBADF));
        let only = |reply| Ok(Answer { reply, ..Answer::default() });
        let with = |descriptor| Ok(Answer { descriptor: Some(descriptor), ..Answer::default() });
        match head.call {
            call::CHANNEL => self.open_channel(descriptor()?),
            call::GUEST_BLOB => self.keep(self.context.make_guest_blob(head.first)?),
            call::HOST_BLOB => {
                self.keep(self.context.make_host_blob(head.first, head.second, head.ring == 1)?)
            }
            call::IMPORT => self.keep(self.context.take_dma_buf(descriptor()?.as_fd())?),
            call::RUNS => {
                let from = usize::try_from(head.second).unwrap_or(usize::MAX);
                let payload = bytes_of_runs(&*self.blob(head.first)?, from);
                Ok(Answer { payload, ..Answer::default() })
            }
            call::SHOWN => {
                let shown = self.blob(head.first)?.shown()?;
                let reply = Reply {
                    first: shown.file_offset,
                    second: shown.length,
                    third: u64::from(shown.writable),
                    ..Reply::default()
                };
                let descriptor = Some(super::super::duplicate(&*shown.file)?);
                Ok(Answer { reply, descriptor, payload: Vec::new() })
            }
            call::EXPORT => with(self.blob(head.first)?.export()?),
            call::OFFSET => only(Reply { first: self.blob(head.first)?.mmap_offset()?, ..Reply::default() }),
            call::DEVICE => {
                let file = self.context.device().ok_or_else(|| invalid("device", libc::ENODEV))?;
                with(file.try_clone_to_owned().map_err(|error| system("dup", "the device's file", error))?)
            }
            call::CLOSE_HANDLE => {
                let mut state = self.lock();
                let blob = match state.blobs.get(&head.first) {
                    Some(Held::Blob(blob)) => Arc::clone(blob),
                    _ => return Err(invalid("a key that is no blob's", libc::ENOENT)),
                };
                state.blobs.insert(head.first, Held::Memory { _stays: Arc::clone(blob.held()) });
                drop(state);
                // Tells the device: not under the lock.
                drop(blob);
                only(Reply::default())
            }
            call::DROP => {
                let gone = self.lock().blobs.remove(&head.first);
                gone.map(drop).ok_or_else(|| invalid("a key that is no blob's", libc::ENOENT))?;
                only(Reply::default())
            }
            _ => Err(invalid("an unknown request", libc::ENOSYS)),
        }
    }

    fn blob(&self, key: u64) -> Result<Arc<ContextBlob>> {
        match self.lock().blobs.get(&key) {
            Some(Held::Blob(blob)) => Ok(Arc::clone(blob)),
            _ => Err(invalid("a key that is no blob's", libc::ENOENT)),
        }
    }

    /// Gives a new blob a key.
    fn keep(&self, blob: ContextBlob) -> Result<Answer> {
        let (resource, size, payload) = (blob.resource().0, blob.size(), bytes_of_runs(&blob, 0));
        let mut state = self.lock();
        if state.blobs.len() >= MOST_BLOBS {
            drop(state);
            return Err(invalid("more blobs than a guest process may have", libc::ENOSPC));
        }
        state.last = state.last.saturating_add(1);
        let key = state.last;
        state.blobs.insert(key, Held::Blob(Arc::new(blob)));
        let reply = Reply { first: key, second: resource.into(), third: size, ..Reply::default() };
        Ok(Answer { reply, payload, descriptor: None })
    }

    /// Serves one more connection, which takes frames.
    fn open_channel(self: &Arc<Self>, socket: OwnedFd) -> Result<Answer> {
        // Any other descriptor is one that a thread could wait at for ever, whatever becomes of the guest process.
        let kind = (sockopt::socket_domain(&socket), sockopt::socket_type(&socket));
        if kind != (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) {
            return Err(invalid("a connection that is none of its kind", libc::EINVAL));
        }
        let socket = Arc::new(socket);
        let mut state = self.lock();
        if state.channels.len() >= MOST_CHANNELS {
            return Err(invalid("more connections than a guest process may have", libc::EAGAIN));
        }
        state.last = state.last.saturating_add(1);
        let key = state.last;
        state.channels.insert(key, Arc::clone(&socket));
        drop(state);
        let guest = Arc::clone(self);
        let started = spawn("kfd-vm-wait", move || {
            // What a guest process does wrong here ends this connection only.
            let _ = requests(socket.as_fd(), &mut wire::buffer(), |message| guest.submit(&message));
            guest.lock().channels.remove(&key);
        });
        if started {
            return Ok(Answer::default());
        }
        self.lock().channels.remove(&key);
        Err(invalid("no thread for a connection", libc::EAGAIN))
    }

    fn submit(&self, message: &Message<Request>) -> Result<Answer> {
        let Message { head, payload, .. } = message;
        let ring = u8::try_from(head.ring).map_err(|_| invalid("a ring's number", libc::EINVAL))?;
        if head.call != call::SUBMIT {
            return Err(invalid("an unknown request", libc::ENOSYS));
        }
        if self.lock().ended {
            return Err(TransportError::Lost("the guest process has ended".into()));
        }
        self.context.submit_and_wait(ring, payload, Duration::from_nanos(head.first))?;
        Ok(Answer::default())
    }

    /// The guest process is gone: its blobs go, then its context, and with that what it waits for.
    fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let blobs = std::mem::take(&mut state.blobs);
        let channels: Vec<_> = state.channels.values().cloned().collect();
        drop(state);
        for channel in channels {
            // One that is closed already needs nothing.
            let _ = shutdown(&*channel, Shutdown::Both);
        }
        drop(blobs);
        self.context.end();
        // Linux lets go of memory when the last dma-buf is closed; the process may have had it.
        self.context.vm().exports().sweep();
    }
}
