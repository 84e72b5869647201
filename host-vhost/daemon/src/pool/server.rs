//! The virtio-fs device over the pool: a FUSE server that knows one directory and files that have no name once they are
//! made, and the window.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vhost::vhost_user::Backend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringRwLock};
use virtio_kfd_protocol::ShareToken;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use zerocopy::IntoBytes;

use super::fuse::{self, Attr, Opcode};
use super::reclaim::Reclaimer;
use super::{GRANULE, Owner, Pool, ROOT, Reclaim};
use crate::chain::{self, Input, Ram};
use crate::guest_warn;
use crate::mapper::{Job, Mapper, OwnRegions, SharedBackend};
use crate::memory::Memory;
use crate::rate::LogBudget;
use crate::vring::{self, Next, give_back, next_chain, signal, wants_more};

/// By what the guest mounts it.
pub const TAG: &str = "virtio-kfd";

/// `VIRTIO_FS_SHMCAP_ID_CACHE`
const WINDOW_ID: u8 = 0;

/// High-priority and request queue.
const QUEUES: usize = 2;
/// The request queue.
const REQUESTS: u32 = 1;
const MAX_QUEUE_SIZE: usize = 1024;

/// `struct virtio_fs_config`: the tag, and the number of request queues.
const TAG_BYTES: usize = 36;

/// What the VMM may take to map the window.
const MAP_PATIENCE: Duration = Duration::from_secs(15);

/// Longest name: 16 hexadecimal digits and the end.
const NAME_BYTES: usize = 17;

/// The device.
pub struct MemoryDevice {
    pool: Arc<Pool>,
    workers: Arc<dyn Reclaim>,
    reclaimer: Reclaimer,
    backend: SharedBackend,
    regions: Arc<OwnRegions>,
    memory: Mutex<Memory>,
    window: Mutex<Window>,
    /// Whether the VMM has the pool in the window. Told by the VMM's own thread, which waits for nothing.
    mapped: AtomicBool,
    log: Mutex<LogBudget>,
}

/// How the pool stands in the guest.
struct Window {
    mapper: Mapper,
    last_job: u64,
}

impl std::fmt::Debug for MemoryDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryDevice").field("pool", &self.pool).finish_non_exhaustive()
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What goes back to the kernel: a body, or an errno.
type Reply = Result<Vec<u8>, Errno>;

impl MemoryDevice {
    /// A device over `pool`.
    pub fn new(pool: Arc<Pool>, workers: Arc<dyn Reclaim>) -> io::Result<Self> {
        let backend = SharedBackend::default();
        let regions = Arc::new(OwnRegions::default());
        let mapper = Mapper::start(backend.clone(), regions.clone(), WINDOW_ID)?;
        let window = Mutex::new(Window { mapper, last_job: 0 });
        let (memory, log) = (Mutex::default(), Mutex::default());
        let mapped = AtomicBool::new(false);
        let reclaimer = Reclaimer::start(&pool, &workers)?;
        Ok(MemoryDevice { pool, workers, reclaimer, backend, regions, memory, window, mapped, log })
    }

    /// Serves a queue until it is empty.
    fn serve(&self, vring: &VringRwLock) {
        loop {
            let ram = held(&self.memory).ram().clone();
            let (chain, head) = match next_chain(vring, ram.clone(), &mut held(&self.log)) {
                Next::Chain(chain, head) => (chain, head),
                Next::Empty if wants_more(vring, &ram) => continue,
                Next::Empty | Next::Dead => return,
            };
            let written = match chain::open(&ram, chain) {
                Ok((mut input, output)) => {
                    self.request(&mut input).map_or(0, |answer| output.write(&ram, &answer))
                }
                Err(error) => {
                    guest_warn!(held(&self.log), "memory: {error}");
                    0
                }
            };
            give_back(vring, &ram, head, written);
            signal(vring, &ram);
        }
    }

    /// A request's answer, if it has one.
    fn request(&self, input: &mut Input<'_>) -> Option<Vec<u8>> {
        let header: fuse::InHeader = input.read().ok()?;
        let opcode = Opcode::from_number(header.opcode);
        let reply = self.answer(opcode, &header, input);
        if let Err(errno) = reply
            && !matches!(errno, Errno::ENOSYS | Errno::ENOENT | Errno::EAGAIN)
        {
            guest_warn!(held(&self.log), "memory: {opcode:?} of process {}: {errno}", header.pid);
        }
        if !opcode.is_answered() {
            return None;
        }
        let (error, body) = match reply {
            Ok(body) => (0, body),
            Err(errno) => ((errno as i32).wrapping_neg(), Vec::new()),
        };
        let len = size_of::<fuse::OutHeader>().saturating_add(body.len());
        let out = fuse::OutHeader { len: u32::try_from(len).ok()?, error, unique: header.unique };
        let mut bytes = out.as_bytes().to_vec();
        bytes.extend(body);
        Some(bytes)
    }

    fn answer(&self, opcode: Opcode, header: &fuse::InHeader, input: &mut Input<'_>) -> Reply {
        let none = Ok(Vec::new());
        let node = header.nodeid;
        match opcode {
            Opcode::Init => self.init(read(input)?),
            Opcode::Destroy => {
                self.pool.reset(&*self.workers);
                self.unmap_window();
                none
            }
            // A file cannot be opened a second time: whoever made it has it.
            Opcode::Lookup => Err(Errno::ENOENT),
            Opcode::Create => self.create(header, input),
            Opcode::GetAttr => self.attributes(node),
            Opcode::SetAttr => {
                let request: fuse::SetAttrIn = read(input)?;
                if node == ROOT || request.valid & fuse::SET_RIGHTS != 0 {
                    return Err(Errno::EPERM);
                }
                if request.valid & fuse::SET_SIZE != 0 {
                    self.pool.resize(node, request.size)?;
                }
                self.attributes(node)
            }
            Opcode::SetupMapping => {
                let request: fuse::SetupMappingIn = read(input)?;
                if request.len != GRANULE {
                    return Err(Errno::EINVAL);
                }
                self.pool.place(node, request.foffset, request.moffset)?;
                none
            }
            Opcode::RemoveMapping => {
                let request: fuse::RemoveMappingIn = read(input)?;
                for _ in 0..request.count {
                    let place: fuse::RemoveMappingOne = read(input)?;
                    self.pool.remove(place.moffset, place.len, &*self.workers);
                }
                self.reclaimer.ring();
                none
            }
            Opcode::Forget => {
                let request: fuse::ForgetIn = read(input)?;
                self.pool.forget(node, request.nlookup, &*self.workers);
                self.reclaimer.ring();
                none
            }
            Opcode::BatchForget => {
                let request: fuse::BatchForgetIn = read(input)?;
                for _ in 0..request.count {
                    let one: fuse::ForgetOne = read(input)?;
                    self.pool.forget(one.nodeid, one.nlookup, &*self.workers);
                }
                self.reclaimer.ring();
                none
            }
            Opcode::StatFs => {
                let (all, free) = self.pool.space();
                let out = fuse::StatFsOut {
                    blocks: all / GRANULE,
                    bfree: free / GRANULE,
                    bavail: free / GRANULE,
                    bsize: u32::try_from(GRANULE).unwrap_or(u32::MAX),
                    frsize: u32::try_from(GRANULE).unwrap_or(u32::MAX),
                    namelen: 16,
                    ..Default::default()
                };
                Ok(out.as_bytes().to_vec())
            }
            Opcode::Release | Opcode::Interrupt => none,
            Opcode::Other(_) => Err(Errno::ENOSYS),
        }
    }

    /// The file system is mounted.
    fn init(&self, request: fuse::InitIn) -> Reply {
        let version = (request.major, request.minor);
        if version < (fuse::MAJOR, fuse::MINOR_AT_LEAST) || request.flags & fuse::FLAG_MAP_ALIGNMENT == 0 {
            let flags = request.flags;
            guest_warn!(
                held(&self.log),
                "memory: the guest's FUSE {version:?}, flags {flags:#x}, has no DAX"
            );
            return Err(Errno::EPROTO);
        }
        self.pool.reset(&*self.workers);
        if let Err(why) = self.map_window() {
            guest_warn!(held(&self.log), "memory: the VMM does not map the window: {why}");
            return Err(Errno::EIO);
        }
        let out = fuse::InitOut {
            major: fuse::MAJOR,
            minor: fuse::MINOR,
            flags: fuse::FLAG_MAP_ALIGNMENT,
            max_background: 16,
            congestion_threshold: 12,
            max_write: 4096,
            time_gran: 1,
            // Places begin at multiples of a page.
            map_alignment: 12,
            ..Default::default()
        };
        Ok(out.as_bytes().to_vec())
    }

    /// Maps the pool at the beginning of the window.
    fn map_window(&self) -> Result<(), String> {
        if self.mapped.load(Ordering::Acquire) {
            return Ok(());
        }
        // A reset of the device takes the map away, a stop leaves it; the VMM refuses to unmap what is not there.
        self.unmap_window();
        let mut window = held(&self.window);
        let file = Arc::new(self.pool.file().try_clone().map_err(|error| error.to_string())?);
        window.ask(|job| {
            let (id, len) = (self.pool.id(), self.pool.size());
            Job::Map { job, file, id, file_offset: 0, offset: 0, len }
        })?;
        self.mapped.store(true, Ordering::Release);
        Ok(())
    }

    /// Takes the pool out of the window. QEMU 11.1.3 crashes when a guest is reset while anything is in a window, so that
    /// nothing may stay when the file system is unmounted.
    fn unmap_window(&self) {
        self.mapped.store(false, Ordering::Release);
        let (id, len) = (self.pool.id(), self.pool.size());
        if let Err(why) = held(&self.window).ask(|job| Job::Unmap { job, id, offset: 0, len }) {
            tracing::debug!("memory: unmap of the window: {why}");
        }
    }

    fn create(&self, header: &fuse::InHeader, input: &mut Input<'_>) -> Reply {
        let _: fuse::CreateIn = read(input)?;
        if header.nodeid != ROOT {
            return Err(Errno::ENOTDIR);
        }
        let owner = Owner { uid: header.uid, gid: header.gid };
        let node = self.pool.create(name(input)?, owner)?;
        let out =
            fuse::CreateOut { nodeid: node, attr: attr(node, owner, 0), fh: node, ..Default::default() };
        Ok(out.as_bytes().to_vec())
    }

    fn attributes(&self, node: u64) -> Reply {
        let attr = if node == ROOT {
            let mode = fuse::MODE_DIRECTORY;
            Attr { ino: ROOT, mode, nlink: 2, blksize: 4096, ..Default::default() }
        } else {
            let known = self.pool.attributes(node)?;
            attr(node, known.owner, known.size)
        };
        Ok(fuse::AttrOut { attr_valid: 1, attr, ..Default::default() }.as_bytes().to_vec())
    }
}

/// A file has no link from the start, so that the kernel gives it up with the last that uses it, however that ends.
fn attr(node: u64, owner: Owner, size: u64) -> Attr {
    let Owner { uid, gid } = owner;
    let blocks = size.div_ceil(512);
    Attr {
        ino: node,
        size,
        blocks,
        mode: fuse::MODE_FILE,
        nlink: 0,
        uid,
        gid,
        blksize: 4096,
        ..Default::default()
    }
}

fn read<T: zerocopy::FromBytes + IntoBytes>(input: &mut Input<'_>) -> Result<T, Errno> {
    input.read().map_err(|_| Errno::EINVAL)
}

/// A name: a token in hexadecimal.
fn name(input: &mut Input<'_>) -> Result<ShareToken, Errno> {
    let mut bytes = [0; NAME_BYTES];
    if input.remaining() != bytes.len() as u64 {
        return Err(Errno::EINVAL);
    }
    input.read_exact(&mut bytes).map_err(|_| Errno::EINVAL)?;
    let digits =
        bytes.strip_suffix(&[0]).and_then(|digits| str::from_utf8(digits).ok()).ok_or(Errno::EINVAL)?;
    let lower = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| lower).ok_or(Errno::EINVAL)?;
    ShareToken::from_blob_id(number).ok_or(Errno::EINVAL)
}

impl Window {
    /// Has a job done.
    fn ask(&mut self, job: impl FnOnce(u64) -> Job) -> Result<(), String> {
        self.last_job = self.last_job.wrapping_add(1);
        let number = self.last_job;
        if !self.mapper.submit(job(number)) {
            return Err("the thread that asks the VMM is gone".into());
        }
        let end = Instant::now().checked_add(MAP_PATIENCE);
        loop {
            if let Some(outcome) = self.mapper.outcomes().into_iter().find(|outcome| outcome.job == number) {
                return outcome.result;
            }
            let left = end.and_then(|end| end.checked_duration_since(Instant::now())).unwrap_or_default();
            if left.is_zero() {
                return Err(format!("no answer in {} s", MAP_PATIENCE.as_secs()));
            }
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.mapper.descriptor(), PollFlags::POLLIN)], left) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(format!("poll: {errno}")),
            }
        }
    }
}

impl VhostUserBackend for MemoryDevice {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        MAX_QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        vring::FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        vring::protocol_features()
    }

    fn reset_device(&self) {
        self.mapped.store(false, Ordering::Release);
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut space = TAG.as_bytes().to_vec();
        space.resize(TAG_BYTES, 0);
        space.extend(1u32.to_le_bytes());
        vring::config_piece(space, offset, size)
    }

    fn update_memory(&self, memory: GuestMemoryAtomic<Ram>) -> io::Result<()> {
        let mut known = held(&self.memory);
        if let Err(error) = known.update(&memory.memory(), |file| file == self.pool.id()) {
            tracing::error!("memory: the VMM's memory table cannot be taken over: {error}");
        }
        self.regions.set(known.own_by_file());
        Ok(())
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        *held(&self.backend) = Some(backend);
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        Ok(VhostUserShMemConfig::new(1, &[self.pool.window()]))
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        if queue == REQUESTS {
            self.mapped.store(false, Ordering::Release);
        }
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        vrings: &[VringRwLock],
        _thread: usize,
    ) -> io::Result<()> {
        if let Some(vring) = vrings.get(usize::from(event)) {
            self.serve(vring);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
