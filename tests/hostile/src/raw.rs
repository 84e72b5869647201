//! A connection without a client: any bytes can be sent as a frame, and what came back is looked at.
#![allow(unsafe_code)] // the answer area is mapped memory that the host writes to

use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_thunk::client::{Client, DEVICE_VARIABLE, LOOPBACK_VARIABLE};
use guest_thunk::transport::loopback::{LoopbackVm, SharedContext};
use guest_thunk::transport::virtgpu::VirtGpu;
use guest_thunk::transport::{Blob, Transport, TransportError};
use virtio_kfd_protocol::calls::{Hello, Nop};
use virtio_kfd_protocol::frame::{AnswerArea, AnswerFrame, RequestFrameBuilder};
use virtio_kfd_protocol::version::{VERSION_MAX, VERSION_MIN};
use virtio_kfd_protocol::{CallType, GuestVa, HelloRequest, Nothing, ResourceId, Status};

/// Bytes of answer memory: the largest answer, and a guard behind it that nothing may touch.
pub const AREA: u64 = 128 * 1024;
const GUARD: u64 = 64 * 1024;

/// What the guard and unused answer memory are filled with.
const FILL: u8 = 0xa5;

/// The longest that a frame may take; waits are sent with a shorter limit of their own.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// What became of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// There is an answer: opcode, status and errno of each request.
    Answered(Vec<(u32, Status, u32)>),
    /// The fence completed and no answer was written.
    Silent,
    /// The transport says that the context is no more.
    Lost,
}

impl Outcome {
    /// Whether any request was done.
    pub fn anything_done(&self) -> bool {
        matches!(self, Outcome::Answered(all) if all.iter().any(|(_, status, _)| status.is_ok()))
    }

    /// The status of the first request.
    pub fn status(&self) -> Option<Status> {
        match self {
            Outcome::Answered(all) => all.first().map(|(_, status, _)| *status),
            _ => None,
        }
    }
}

/// A new context on the host that the environment names.
pub fn transport() -> Result<Box<dyn Transport>, TransportError> {
    if let Some(socket) = variable(LOOPBACK_VARIABLE) {
        return loopback(Path::new(&socket));
    }
    match variable(DEVICE_VARIABLE) {
        Some(path) => Ok(Box::new(VirtGpu::open(Path::new(&path))?)),
        None => Ok(Box::new(VirtGpu::find()?)),
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// A context of the VM that another process keeps at the socket, or else of this process's own: all contexts are processes of
/// one guest.
fn loopback(socket: &Path) -> Result<Box<dyn Transport>, TransportError> {
    static VM: Mutex<Option<LoopbackVm>> = Mutex::new(None);
    if let Some(shared) = SharedContext::connect(socket)? {
        return Ok(Box::new(shared));
    }
    let mut vm = VM.lock().unwrap_or_else(PoisonError::into_inner);
    if vm.is_none() {
        *vm = Some(LoopbackVm::connect(socket)?);
    }
    let vm = vm.as_ref().ok_or(TransportError::NotSupported("loop-back without a VM"))?;
    Ok(Box::new(vm.context()?))
}

/// A client with a context of its own.
pub fn client() -> Result<Client> {
    Ok(Client::over(transport()?)?)
}

/// A mapping of a blob.
pub struct View {
    address: usize,
    length: usize,
}

impl View {
    /// Maps a blob at an address that the kernel chooses.
    pub fn of(blob: &dyn Blob) -> Result<View> {
        let length = usize::try_from(blob.size())?;
        // SAFETY: a new private mapping at an address that the kernel chooses touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            bail!("mmap of {length} bytes: {}", std::io::Error::last_os_error());
        }
        let view = View { address: address.expose_provenance(), length };
        blob.map_fixed(GuestVa(view.address as u64), blob.size(), libc::PROT_READ | libc::PROT_WRITE)
            .context("map a blob")?;
        Ok(view)
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: the mapping is ours, writable, and as long as this; the host's writes to it race with nothing that
        // Rust assumes, since no reference to it exists.
        unsafe { std::ptr::write_bytes(self.pointer(0), byte, self.length) };
    }

    /// A copy of the bytes from `from` on.
    pub fn copy(&self, from: usize, length: usize) -> Vec<u8> {
        let length = length.min(self.length.saturating_sub(from));
        let mut bytes = vec![0; length];
        // SAFETY: both ranges are `length` bytes long: the source was cut to the mapping, the target made so.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(from), bytes.as_mut_ptr(), length) };
        bytes
    }

    /// The 64-bit word at a byte offset, a multiple of 8.
    pub fn load(&self, offset: u64) -> u64 {
        self.word(offset).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes the 64-bit word at a byte offset, a multiple of 8.
    pub fn store(&self, offset: u64, value: u64) {
        if let Some(word) = self.word(offset) {
            word.store(value, Ordering::Release);
        }
    }

    fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(8))?;
        if offset.checked_add(8)? > self.length {
            return None;
        }
        // SAFETY: the word lies within the mapping, which is aligned to pages, readable and writable, and lives as long as `self`. The
        // host changes it at any time, which an atomic bears.
        unsafe { self.pointer(offset).cast::<AtomicU64>().as_ref() }
    }

    fn pointer(&self, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address.saturating_add(offset))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no pointer to it outlives this.
        unsafe { libc::munmap(self.pointer(0).cast(), self.length) };
    }
}

/// A context with answer memory.
pub struct Raw {
    view: View,
    blob: Box<dyn Blob>,
    pub transport: Box<dyn Transport>,
    pub sequence: u64,
}

impl Raw {
    /// Makes a context without greeting the host.
    pub fn silent() -> Result<Raw> {
        let transport = transport()?;
        let blob = transport.guest_blob(AREA + GUARD).context("answer memory")?;
        let view = View::of(&*blob)?;
        view.fill(FILL);
        Ok(Raw { view, blob, transport, sequence: 0 })
    }

    /// Makes a context and greets the host.
    pub fn connect() -> Result<Raw> {
        let mut raw = Raw::silent()?;
        let hello = HelloRequest { version_min: VERSION_MIN, version_max: VERSION_MAX, ..Default::default() };
        let area = raw.area();
        let mut frame = RequestFrameBuilder::new(0, raw.next(), area);
        frame.push::<Hello>(&hello, &[], 0)?;
        match raw.send(0, &frame.finish())? {
            outcome if outcome.anything_done() => Ok(raw),
            other => bail!("the host does not greet back: {other:?}"),
        }
    }

    pub fn next(&mut self) -> u64 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// The answer memory that a well-behaved client names.
    pub fn area(&self) -> AnswerArea {
        AnswerArea { resource: self.resource(), offset: 0, capacity: AREA as u32 }
    }

    pub fn resource(&self) -> ResourceId {
        self.blob.resource()
    }

    /// Sends bytes as a frame and looks at what came back. An error means that the host broke a promise: it wrote where
    /// it was not asked to, or a fence did not complete.
    pub fn send(&mut self, ring: u8, frame: &[u8]) -> Result<Outcome> {
        self.view.fill(FILL);
        match self.transport.submit_and_wait(ring, frame, PATIENCE) {
            Ok(()) => {}
            Err(TransportError::Lost(why)) if why.contains("did not complete") => {
                bail!("a fence did not complete: {why}")
            }
            // The guest's driver refuses some frames itself: too long, for example.
            Err(_) => return Ok(Outcome::Lost),
        }
        if self.view.copy(AREA as usize, GUARD as usize).iter().any(|byte| *byte != FILL) {
            bail!("the host wrote behind the answer memory that the frame named");
        }
        let area = self.view.copy(0, AREA as usize);
        if area.iter().all(|byte| *byte == FILL) {
            return Ok(Outcome::Silent);
        }
        let answer = AnswerFrame::parse(&area).context("the host's answer")?;
        let of = |raw: &virtio_kfd_protocol::frame::RawAnswer<'_>| {
            (raw.header.opcode, raw.header.status, raw.header.errno)
        };
        Ok(Outcome::Answered(answer.answers.iter().map(of).collect()))
    }

    /// Sends one well-formed request.
    pub fn call<C: CallType>(
        &mut self,
        ring: u8,
        request: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
    ) -> Result<Outcome> {
        let area = self.area();
        let mut frame = RequestFrameBuilder::new(VERSION_MAX, self.next(), area);
        frame.push::<C>(request, tail, answer_elements)?;
        self.send(ring, &frame.finish())
    }

    /// Whether the context still answers.
    pub fn alive(&mut self) -> Result<bool> {
        Ok(self.call::<Nop>(0, &Nothing {}, &[], 0)?.anything_done())
    }
}
