//! Streams of system management events.
//!
//! What a program gets is an end of a pair of sockets: it can be read, written, polled and inherited like the device's. Two threads
//! serve it, from the first stream to the last one's end, and sleep while nothing happens: one waits for lines at the host, the
//! other for masks that the program writes and for its closing a stream. The host sends all events, so that one that
//! comes right after a mask was written is not missed: a line is held against the mask when it has come, and the mask was
//! written before what it tells of.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use kfd_abi::smi::{KFD_SMI_EVENT_QUEUE_EVICTION, KFD_SMI_EVENT_QUEUE_RESTORE, event_mask};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, shutdown, socketpair,
};
use nix::time::{ClockId, clock_gettime};
use thiserror::Error;
use virtio_kfd_protocol::calls::{CloseSmi, OpenSmi, ReadSmi};
use virtio_kfd_protocol::limits::MAX_SMI_BYTES;
use virtio_kfd_protocol::{GpuId, GpuRequest, ReadSmiRequest, SMI_CLOSED, SMI_LINES, SmiStream, Status};

use super::lock::lock;
use super::refusal::{Level, Refusal, say};
use super::wake::Wake;
use crate::client::{Client, ClientError};
use crate::transport::own::Kept;

/// Stack of a thread in bytes.
const STACK_BYTES: usize = 128 << 10;

/// Before lines are asked for again that the host had no room to be asked for.
const AGAIN: Duration = Duration::from_millis(50);

/// What has a connection: the threads here do not keep it from its end.
pub trait Connected: Send + Sync + 'static {
    /// The connection.
    fn client(&self) -> &Client;
}

impl Connected for Client {
    fn client(&self) -> &Client {
        self
    }
}

/// Why there is no stream.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The host refused.
    #[error("{0}")]
    Host(#[from] ClientError),
    /// The guest's kernel did.
    #[error("no descriptor for events: {0}")]
    System(#[from] io::Error),
}

impl From<Errno> for OpenError {
    fn from(errno: Errno) -> Self {
        OpenError::System(errno.into())
    }
}

impl From<OpenError> for Refusal {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Host(error) => error.into(),
            OpenError::System(_) => Refusal::error(error.to_string()),
        }
    }
}

/// The streams of a connection.
#[derive(Default)]
pub struct Smi {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    streams: Vec<Arc<Stream>>,
    /// Whether the thread that waits at the host runs.
    reads: bool,
    /// Whether the other one runs; what ends its sleep.
    watches: Option<Arc<Wake>>,
}

/// A stream that the program has not closed.
struct Stream {
    /// The host's number.
    id: u32,
    socket: Arc<Kept>,
    /// Bits of events that the program wants.
    mask: Mutex<u64>,
}

/// The library's ends of streams whose connection has ended. A program that writes to one must not get a SIGPIPE, which it does
/// not from the device, so they are kept until the program has closed its own.
static LEFT: Mutex<Vec<Arc<Kept>>> = Mutex::new(Vec::new());

/// Whether the program has closed its end.
fn is_over(socket: &Kept) -> bool {
    let mut polled = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let found = poll(&mut polled, PollTimeout::ZERO).map(|_| polled);
    found.is_ok_and(|[polled]| polled.any() == Some(true))
}

impl Stream {
    /// Takes what the program has written: each 8 bytes are a mask, and the last one counts.
    fn look(&self, mask: &mut u64) {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            let masks = bytes.get(..count).unwrap_or(&bytes).as_chunks::<8>().0;
            if let Some(last) = masks.last() {
                *mask = u64::from_ne_bytes(*last);
            }
        }
    }

    /// Gives the program the lines that it wants. Those that find no room are lost, as in the kernel.
    fn deliver(&self, text: &[u8], later: i128) {
        let mut mask = lock(&self.mask);
        self.look(&mut mask);
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let Some(event) = event(line) else { continue };
            // That some were lost the kernel tells whoever wants any.
            let wanted = if event == DROPPED_EVENT { u64::MAX } else { event_mask(event) };
            if *mask & wanted == 0 {
                continue;
            }
            let shifted = shift(line, event, later);
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(self.socket.as_raw_fd(), shifted.as_deref().unwrap_or(line), flags);
        }
    }
}

/// `KFD_SMI_EVENT_DROPPED_EVENT` of AMD's driver.
const DROPPED_EVENT: u32 = 14;

/// The number of a line's event.
fn event(line: &[u8]) -> Option<u32> {
    let number = line.split(|byte| *byte == b' ').next()?;
    u32::from_str_radix(std::str::from_utf8(number).ok()?, 16).ok()
}

/// A line with a time, which is the host's, with the guest's.
fn shift(line: &[u8], event: u32, later: i128) -> Option<Vec<u8>> {
    if !matches!(event, KFD_SMI_EVENT_QUEUE_EVICTION | KFD_SMI_EVENT_QUEUE_RESTORE | DROPPED_EVENT) {
        return None;
    }
    let text = std::str::from_utf8(line).ok()?;
    let (_, rest) = text.split_once(' ')?;
    let (time, rest) = rest.split_once(' ')?;
    let time = time.parse::<i128>().ok()?.saturating_add(later).max(0);
    Some(format!("{event:x} {time} {rest}").into_bytes())
}

/// How much later it is in the guest, in ns.
fn later_than(host: u64) -> i128 {
    let Ok(time) = clock_gettime(ClockId::CLOCK_BOOTTIME) else { return 0 };
    let seconds = i128::from(time.tv_sec()).saturating_mul(1_000_000_000);
    seconds.saturating_add(i128::from(time.tv_nsec())).saturating_sub(i128::from(host))
}

impl Smi {
    /// A descriptor of events of a GPU, not closed on exec, as KFD makes it.
    pub fn open<C: Connected>(&self, connection: &Arc<C>, gpu_id: GpuId) -> Result<OwnedFd, OpenError> {
        // A child of fork may find it locked for ever.
        if let Ok(mut left) = LEFT.try_lock() {
            left.retain(|socket| !is_over(socket));
        }
        let mut state = lock(&self.shared.state);
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let client = connection.client();
        // Places of the host are few: what the program has closed must not count.
        state.sweep(Some(client));
        let (answer, _) = client.call::<OpenSmi>(&GpuRequest { gpu_id, pad: 0 }, &[], 0)?;
        let id = answer.stream;
        let socket = Arc::new(Kept::new(socket));
        state.streams.push(Arc::new(Stream { id, socket, mask: Mutex::new(0) }));
        if let Err(error) = self.start(&mut state, connection) {
            state.streams.retain(|stream| stream.id != id);
            // Else it ends with the connection.
            let _ = client.call::<CloseSmi>(&SmiStream { stream: id, pad: 0 }, &[], 0);
            return Err(error.into());
        }
        Ok(theirs)
    }

    /// Starts the threads where they do not run, and tells the second one of the new stream.
    fn start<C: Connected>(&self, state: &mut State, connection: &Arc<C>) -> io::Result<()> {
        match &state.watches {
            Some(poke) => {
                poke.call();
            }
            None => {
                let poke = Arc::new(Wake::new()?);
                let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(connection));
                let own = Arc::clone(&poke);
                spawn("smi-watch", move || watch(&shared, &weak, &own))?;
                state.watches = Some(poke);
            }
        }
        if !state.reads {
            let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(connection));
            spawn("smi-read", move || read(&shared, &weak))?;
            state.reads = true;
        }
        Ok(())
    }

    /// Ends all streams: their descriptors read as ended from now on.
    pub fn release_all(&self, client: &Client) {
        let mut state = lock(&self.shared.state);
        for stream in &state.streams {
            let _ = client.call::<CloseSmi>(&SmiStream { stream: stream.id, pad: 0 }, &[], 0);
        }
        state.end();
    }
}

impl State {
    /// Closes what the program has closed.
    fn sweep(&mut self, client: Option<&Client>) {
        self.streams.retain(|stream| {
            let over = is_over(&stream.socket);
            if let Some(client) = client
                && over
            {
                // Else it ends with the connection.
                let _ = client.call::<CloseSmi>(&SmiStream { stream: stream.id, pad: 0 }, &[], 0);
            }
            !over
        });
    }

    /// All descriptors read as ended.
    fn end(&mut self) {
        for stream in self.streams.drain(..) {
            let _ = shutdown(stream.socket.as_raw_fd(), Shutdown::Write);
            let socket = Arc::clone(&stream.socket);
            match LEFT.try_lock() {
                Ok(mut left) => left.push(socket),
                Err(_) => std::mem::forget(socket),
            }
        }
        if let Some(poke) = &self.watches {
            poke.call();
        }
    }
}

/// A thread without the program's signals.
fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    // The program's signals are handled by its own threads. The new one inherits this.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let thread = builder.spawn(body);
    before.thread_set_mask()?;
    thread.map(drop)
}

/// Waits for lines at the host, until there is no stream.
fn read<C: Connected>(shared: &Shared, connection: &Weak<C>) {
    loop {
        let Some(connection) = connection.upgrade() else { return };
        let request = ReadSmiRequest { timeout: u32::MAX, pad: 0 };
        let answer = connection.client().wait_call::<ReadSmi>(&request, &[], MAX_SMI_BYTES);
        let mut state = lock(&shared.state);
        match answer {
            Ok((answer, text)) if answer.outcome == SMI_LINES => {
                let later = later_than(answer.boot_time);
                let stream = state.streams.iter().find(|stream| stream.id == answer.stream).cloned();
                drop(state);
                if let Some(stream) = stream {
                    stream.deliver(&text, later);
                }
            }
            // One may have been opened since.
            Ok((answer, _)) if answer.outcome == SMI_CLOSED && !state.streams.is_empty() => {}
            Ok((answer, _)) if answer.outcome != SMI_CLOSED => {}
            Ok(_) => {
                state.reads = false;
                return;
            }
            // Others of this VM have the room: until later.
            Err(error) if matches!(error.status(), Some((Status::LIMIT, _))) && !state.streams.is_empty() => {
                drop(state);
                drop(connection);
                thread::sleep(AGAIN);
            }
            Err(error) => {
                say(Level::Warning, || format!("no more system management events: {error}"));
                state.reads = false;
                state.end();
                return;
            }
        }
    }
}

/// Takes masks, and closes what the program has closed, until there is no stream.
fn watch<C: Connected>(shared: &Shared, connection: &Weak<C>, poke: &Wake) {
    loop {
        let streams = {
            let mut state = lock(&shared.state);
            let connection = connection.upgrade();
            state.sweep(connection.as_deref().map(Connected::client));
            if state.streams.is_empty() {
                state.watches = None;
                return;
            }
            state.streams.clone()
        };
        let mut polled = vec![PollFd::new(poke.as_fd(), PollFlags::POLLIN)];
        polled.extend(streams.iter().map(|stream| PollFd::new(stream.socket.as_fd(), PollFlags::POLLIN)));
        let polled = match poll(&mut polled, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        };
        match polled.and_then(|()| poke.take()) {
            Ok(()) => {}
            Err(error) => {
                // Masks are looked at when lines come, too.
                say(Level::Warning, || format!("system management events are not watched any more: {error}"));
                lock(&shared.state).watches = None;
                return;
            }
        }
        for stream in &streams {
            stream.look(&mut lock(&stream.mask));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use virtio_kfd_protocol::{ReadSmiAnswer, Request};

    use super::*;
    use crate::client::tests::host::{FakeHost, Fate, answer_with};

    /// Lines by KFD_EVENT_FMT_* of linux/kfd_ioctl.h.
    #[test]
    fn times_become_the_guests_and_other_lines_stay() {
        let shifted = |line: &str, later| {
            let event = event(line.as_bytes()).unwrap();
            shift(line.as_bytes(), event, later).map(|line| String::from_utf8(line).unwrap())
        };
        assert_eq!(shifted("9 5000 -12 66af 1\n", 7).as_deref(), Some("9 5007 -12 66af 1\n"));
        assert_eq!(shifted("a 5000 -12 66af 0\n", -8).as_deref(), Some("a 4992 -12 66af 0\n"));
        assert_eq!(shifted("a 5000 -12 66af 0\n", -5001).as_deref(), Some("a 0 -12 66af 0\n"));
        assert_eq!(shifted("e 5000 -12 17\n", 7).as_deref(), Some("e 5007 -12 17\n"));
        assert_eq!(shifted("1 c:program\n", 7), None);
        assert_eq!(event(b"x 1\n"), None);
    }

    #[test]
    fn a_stream_gets_what_its_last_mask_names() {
        let flags = SockFlag::SOCK_NONBLOCK;
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
        let stream = Stream { id: 1, socket: Arc::new(Kept::new(socket)), mask: Mutex::new(0) };
        let read = |buffer: &mut [u8]| nix::unistd::read(&theirs, buffer);
        let write = |mask: u64| nix::unistd::write(&theirs, &mask.to_ne_bytes()).unwrap();
        let mut buffer = [0; 64];
        stream.deliver(b"1 c:program\n", 0);
        assert_eq!(read(&mut buffer), Err(Errno::EAGAIN));
        write(event_mask(1));
        write(event_mask(2) | event_mask(9));
        stream.deliver(b"1 c:program\n2 4:1\n9 5 -12 66af 1\n", 1);
        let count = read(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"2 4:1\n9 6 -12 66af 1\n");
        drop(theirs);
        assert!(is_over(&stream.socket));
        stream.deliver(b"2 4:1\n", 1);
    }

    /// A host with one stream, that has no room for the first questions.
    #[test]
    fn a_host_without_room_is_asked_again_for_lines() {
        let asked = AtomicU32::new(0);
        let host = FakeHost::new(move |_, frame| {
            let answer = answer_with(frame, |request, answer| {
                let header = &request.header;
                match Request::decode(request).unwrap() {
                    Request::OpenSmi { .. } => {
                        answer.push::<OpenSmi>(header, &SmiStream { stream: 5, pad: 0 }, &[]);
                    }
                    Request::ReadSmi { .. } => match asked.fetch_add(1, Ordering::SeqCst) {
                        // A wait, then the look: the refusal reaches the thread.
                        0..=5 => answer.push_status(header.opcode, Status::LIMIT, 0),
                        _ => {
                            thread::sleep(Duration::from_millis(1));
                            let lines = ReadSmiAnswer { outcome: SMI_LINES, stream: 5, ..Default::default() };
                            answer.push::<ReadSmi>(header, &lines, b"2 4:1\n");
                        }
                    },
                    _ => answer.push_status(header.opcode, Status::OK, 0),
                }
            });
            Fate::Answer(answer)
        });
        let client = Arc::new(Client::over(Box::new(host)).unwrap());
        let smi = Smi::default();
        let theirs = smi.open(&client, GpuId(77)).unwrap();
        nix::unistd::write(&theirs, &event_mask(2).to_ne_bytes()).unwrap();
        let mut polled = [PollFd::new(theirs.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::from(60_000u16)), Ok(1));
        let mut line = [0; 6];
        assert_eq!(nix::unistd::read(&theirs, &mut line), Ok(6), "not an end");
        assert_eq!(&line, b"2 4:1\n");
        smi.release_all(&client);
    }
}
