//! A guest process of a VM that another process keeps (see [`super::host`]).
//!
//! It has no thread of its own. Requests about blobs go over the first connection, one at a time; each frame that is under
//! way has a connection to itself, which is used again for the next one.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socketpair,
};
use virtio_kfd_protocol::{Capset, GuestVa, ResourceId};
use zerocopy::FromBytes;

use super::COMMAND_LIMIT;
use super::context::whole;
use super::host::seqpacket;
use super::ram::map_runs;
use super::system;
use super::window::Shown;
use super::wire::{self, Message, Reply, Request, Run, call, status};
use crate::transport::own::Kept;
use crate::transport::{Blob, Result, Transport, TransportError};

/// Most frames that can be under way at a time. A context has fewer.
const MOST_CHANNELS: usize = 256;

/// How long the VM's process may take to accept a connection or to take a message.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long after the end of a wait its end may be told.
const SLACK: Duration = Duration::from_secs(10);

/// A context of a VM that another process keeps.
pub struct SharedContext {
    link: Handle,
    capset: Capset,
}

/// The connections. In a forked child they are never dropped: they are the parent's.
struct Link {
    control: Kept,
    /// Held while a request on it is under way.
    controlled: Mutex<Vec<u8>>,
    channels: Box<[OnceLock<Kept>]>,
    free: Mutex<Free>,
    memory: Kept,
    device: OnceLock<Kept>,
    abandoned: AtomicBool,
    owner: u32,
}

/// Which connections for frames are not in use.
#[derive(Default)]
struct Free {
    made: usize,
    idle: Vec<usize>,
}

/// Keeps the connections.
struct Handle(Arc<Link>);

impl Clone for Handle {
    fn clone(&self) -> Self {
        Handle(Arc::clone(&self.0))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_mine() {
            std::mem::forget(Arc::clone(&self.0));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics while it holds a lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(error: io::Error) -> TransportError {
    TransportError::Lost(format!("the process that keeps the VM: {error}"))
}

/// A request that was not sent. Where this process, or the kernel, was short of something the connection is as it was.
fn unsent(error: io::Error) -> TransportError {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::ENOBUFS | libc::ETOOMANYREFS) => system("sendmsg", "a request", error),
        _ => lost(error),
    }
}

/// Takes the reply to a request.
fn answer(socket: BorrowedFd<'_>, buffer: &mut [u8], limit: Duration) -> Result<Message<Reply>> {
    let message = wire::receive::<Reply>(socket, buffer, Instant::now().checked_add(limit)).map_err(lost)?;
    let gone = || TransportError::Lost("the process that keeps the VM has closed the connection".into());
    let message = message.ok_or_else(gone)?;
    let sentence = || String::from_utf8_lossy(&message.payload).into_owned();
    match message.head.status {
        status::OK => Ok(message),
        status::LOST => Err(TransportError::Lost(sentence())),
        _ => {
            let error = io::Error::from_raw_os_error(message.head.errno);
            Err(system("the VM", sentence(), error))
        }
    }
}

impl SharedContext {
    /// Connects to the process that keeps a VM; none if that is not what is at the path.
    ///
    /// # Errors
    /// The process speaks another version, or is in trouble.
    pub fn connect(path: &Path) -> Result<Option<SharedContext>> {
        let failed = |call| move |errno: Errno| system(call, path.display().to_string(), errno.into());
        let address = SocketAddrUnix::new(path).map_err(failed("connect"))?;
        let control = seqpacket().map_err(failed("socket"))?;
        set_socket_timeout(&control, Timeout::Send, Some(PATIENCE)).map_err(failed("setsockopt"))?;
        loop {
            match connect(&control, &address) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let why = format!("{}: no connection in {PATIENCE:?}", path.display());
                    return Err(TransportError::NoDevice(why));
                }
                // A vhost-user socket, which is of another type, or nothing: the caller finds out.
                Err(_) => return Ok(None),
            }
        }
        let request = Request { call: call::GREET, first: wire::VERSION, ..Request::default() };
        wire::send(control.as_fd(), &request, &[], None).map_err(lost)?;
        let mut buffer = wire::buffer();
        let greeting = answer(control.as_fd(), &mut buffer, COMMAND_LIMIT.saturating_add(SLACK))?;
        let capset = Capset::parse(&greeting.payload)?;
        let memory = greeting.descriptor.ok_or_else(|| missing("its memory"))?;
        let link = Link {
            control: Kept::new(control),
            controlled: Mutex::new(buffer),
            channels: (0..MOST_CHANNELS).map(|_| OnceLock::new()).collect(),
            free: Mutex::default(),
            memory: Kept::new(memory),
            device: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            owner: std::process::id(),
        };
        Ok(Some(SharedContext { link: Handle(Arc::new(link)), capset }))
    }

    fn blob(
        &self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
        host: bool,
    ) -> Result<Box<dyn Blob>> {
        let message = self.link.0.request(request, descriptor)?;
        let Reply { first: key, second, third: size, .. } = message.head;
        let resource = u32::try_from(second).map_err(|_| missing("the resource's id"))?;
        // Dropped on the way, it goes on the other side, too.
        let mut blob = SharedBlob {
            held: Held { link: self.link.clone(), key },
            resource: ResourceId(resource),
            size,
            runs: Vec::new(),
        };
        let mut runs = read_runs(&message.payload)?;
        // A blob of guest memory has some, and one whose last reply was full may have more.
        while !host && !runs.is_empty() {
            let full = runs.len() == wire::MOST_RUNS;
            blob.runs.append(&mut runs);
            if full {
                let from = blob.runs.len() as u64;
                let request = Request { call: call::RUNS, first: key, second: from, ..Request::default() };
                runs = read_runs(&self.link.0.request(&request, None)?.payload)?;
            }
        }
        Ok(Box::new(blob))
    }
}

fn missing(what: &str) -> TransportError {
    TransportError::Lost(format!("the process that keeps the VM did not send {what}"))
}

fn read_runs(bytes: &[u8]) -> Result<Vec<Run>> {
    let runs = bytes.chunks(size_of::<Run>()).map(Run::read_from_bytes);
    runs.collect::<std::result::Result<_, _>>().map_err(|_| missing("whole runs of memory"))
}

impl Link {
    fn is_mine(&self) -> bool {
        self.owner == std::process::id()
    }

    fn usable(&self) -> Result<()> {
        if self.is_mine() {
            return Ok(());
        }
        Err(TransportError::NotSupported("a context that a parent process made"))
    }

    /// A request on the first connection.
    fn request(&self, request: &Request, descriptor: Option<BorrowedFd<'_>>) -> Result<Message<Reply>> {
        self.usable()?;
        let mut buffer = lock(&self.controlled);
        let control = self.control.as_fd();
        let ended = wire::send(control, request, &[], descriptor)
            .map_err(unsent)
            .and_then(|()| answer(control, &mut buffer, COMMAND_LIMIT.saturating_add(SLACK)));
        if matches!(ended, Err(TransportError::Lost(_))) {
            // A reply that comes later must not be taken for that of another request.
            let _ = shutdown(control, Shutdown::Both);
        }
        ended
    }

    /// Takes a connection for a frame out of those that are free, or makes one.
    fn take_channel(&self) -> Result<(usize, BorrowedFd<'_>)> {
        let short =
            |what: &'static str| system("SUBMIT_3D", what, io::Error::from_raw_os_error(libc::EAGAIN));
        let number = {
            let mut free = lock(&self.free);
            match free.idle.pop() {
                Some(number) => number,
                None => {
                    let number = free.made;
                    free.made = number.saturating_add(1);
                    number
                }
            }
        };
        let place = self.channels.get(number).ok_or_else(|| short("more frames under way than can be"))?;
        if let Some(channel) = place.get() {
            return Ok((number, channel.as_fd()));
        }
        match self.open_channel() {
            Ok(channel) => Ok((number, place.get_or_init(|| Kept::new(channel)).as_fd())),
            Err(error) => {
                lock(&self.free).idle.push(number);
                Err(error)
            }
        }
    }

    fn open_channel(&self) -> Result<OwnedFd> {
        let failed = |errno: Errno| system("socketpair", "a connection for frames", errno.into());
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        set_socket_timeout(&own, Timeout::Send, Some(PATIENCE)).map_err(failed)?;
        let request = Request { call: call::CHANNEL, ..Request::default() };
        self.request(&request, Some(other.as_fd()))?;
        Ok(own)
    }
}

/// A blob's key, until dropped.
struct Held {
    link: Handle,
    key: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        let request = Request { call: call::DROP, first: self.key, ..Request::default() };
        // Where the other side is gone, so is the blob; in a forked child it is the parent's.
        let _ = self.link.0.request(&request, None);
    }
}

struct SharedBlob {
    held: Held,
    resource: ResourceId,
    size: u64,
    /// Of guest memory; a host blob has none.
    runs: Vec<Run>,
}

impl SharedBlob {
    fn about(&self, call: u32) -> Result<Message<Reply>> {
        self.held.link.0.request(&Request { call, first: self.held.key, ..Request::default() }, None)
    }
}

impl Blob for SharedBlob {
    fn resource(&self) -> ResourceId {
        self.resource
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        let link = &self.held.link.0;
        link.usable()?;
        whole(length)?;
        if !self.runs.is_empty() {
            let places = self.runs.iter().map(|run| (run.offset, run.length));
            return map_runs(link.memory.as_fd(), places, address, length, protection);
        }
        if length != self.size {
            return Err(TransportError::NotSupported("mapping a part of a host blob"));
        }
        let Message { head, descriptor, .. } = self.about(call::SHOWN)?;
        let file = descriptor.map(File::from).ok_or_else(|| missing("the memory of a host blob"))?;
        let shown = Shown {
            length: head.second,
            file: Arc::new(file),
            file_offset: head.first,
            writable: head.third != 0,
        };
        shown.map_fixed(address, length, protection)
    }

    fn export(&self) -> Result<OwnedFd> {
        self.about(call::EXPORT)?.descriptor.ok_or_else(|| missing("a dma-buf"))
    }

    fn mmap_offset(&self) -> Result<u64> {
        Ok(self.about(call::OFFSET)?.head.first)
    }

    fn close_handle(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        // Where that fails, the other side is gone.
        let _ = self.about(call::CLOSE_HANDLE);
        Box::new(self.held)
    }
}

impl Transport for SharedContext {
    fn capset(&self) -> &Capset {
        &self.capset
    }

    fn submit_and_wait(&self, ring: u8, frame: &[u8], limit: Duration) -> Result<()> {
        let link = &self.link.0;
        link.usable()?;
        if frame.len() > wire::MOST_PAYLOAD {
            return Err(TransportError::NotSupported("a frame of more than 128 KiB"));
        }
        let (number, channel) = link.take_channel()?;
        let first = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let request = Request { call: call::SUBMIT, ring: ring.into(), first, second: 0 };
        let mut buffer = [0; wire::MOST_HEAD + wire::MOST_SENTENCE];
        let ended = wire::send(channel, &request, frame, None)
            .map_err(unsent)
            .and_then(|()| answer(channel, &mut buffer, limit.saturating_add(SLACK)));
        if !matches!(ended, Err(TransportError::Lost(_))) {
            lock(&link.free).idle.push(number);
        }
        ended.map(|_| ())
    }

    fn guest_blob(&self, size: u64) -> Result<Box<dyn Blob>> {
        self.blob(&Request { call: call::GUEST_BLOB, first: size, ..Request::default() }, None, false)
    }

    fn host_memory(&self, blob_id: u64, size: u64, mappable: bool) -> Result<Box<dyn Blob>> {
        let ring = u32::from(mappable);
        self.blob(&Request { call: call::HOST_BLOB, ring, first: blob_id, second: size }, None, true)
    }

    fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>> {
        self.blob(&Request { call: call::IMPORT, ..Request::default() }, Some(dma_buf), false)
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        let link = &self.link.0;
        link.usable().ok()?;
        if let Some(device) = link.device.get() {
            return Some(device.as_fd());
        }
        let found =
            link.request(&Request { call: call::DEVICE, ..Request::default() }, None).ok()?.descriptor?;
        Some(link.device.get_or_init(|| Kept::new(found)).as_fd())
    }

    fn abandon(&self) {
        let link = &self.link.0;
        if link.is_mine() || link.abandoned.swap(true, Ordering::Relaxed) {
            return;
        }
        let descriptors = link.channels.iter().chain([&link.device]).filter_map(OnceLock::get);
        descriptors.chain([&link.control, &link.memory]).for_each(Kept::abandon);
    }
}
