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
use vhost_user_backend::{VhostUserBackend, VringRwLock, VringT};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_kfd_protocol::ShareToken;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use zerocopy::IntoBytes;

use super::fuse::{self, Attr, Opcode};
use super::{GRANULE, Owner, Pool, ROOT, Reclaim};
use crate::chain::{self, Input, Ram};
use crate::guest_warn;
use crate::mapper::{Job, Mapper, OwnRegions, SharedBackend};
use crate::memory::Memory;
use crate::rate::LogBudget;

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
        Ok(MemoryDevice { pool, workers, backend, regions, memory, window, mapped, log })
    }

    /// Serves a queue until it is empty.
    fn serve(&self, vring: &VringRwLock) {
        loop {
            let ram = held(&self.memory).ram().clone();
            let mut ring = vring.get_mut();
            if !ring.is_enabled() {
                return;
            }
            let queue = ring.get_queue_mut();
            let chain = match queue.iter(ram.clone()).map(|mut chains| chains.next()) {
                Ok(Some(chain)) => chain,
                Ok(None) if queue.enable_notification(&*ram).unwrap_or(false) => continue,
                Ok(None) => return,
                Err(error) => {
                    guest_warn!(held(&self.log), "memory: the guest's driver broke a queue: {error}");
                    return;
                }
            };
            // Not held while a request is served.
            drop(ring);
            let head = chain.head_index();
            let written = match chain::open(&ram, chain) {
                Ok((mut input, output)) => {
                    self.request(&mut input).map_or(0, |answer| output.write(&ram, &answer))
                }
                Err(error) => {
                    guest_warn!(held(&self.log), "memory: {error}");
                    0
                }
            };
            let mut ring = vring.get_mut();
            let queue = ring.get_queue_mut();
            if let Err(error) = queue.add_used(&*ram, head, written) {
                tracing::debug!("memory: used ring: {error}");
            }
            if queue.needs_notification(&*ram).unwrap_or(true)
                && let Err(error) = ring.signal_used_queue()
            {
                tracing::debug!("memory: the VMM cannot be notified: {error}");
            }
        }
    }

    /// A request's answer, if it has one.
    fn request(&self, input: &mut Input<'_>) -> Option<Vec<u8>> {
        let header: fuse::InHeader = input.read().ok()?;
        let opcode = Opcode::from_number(header.opcode);
        let reply = self.answer(opcode, &header, input);
        if let Err(errno) = reply
            && !matches!(errno, Errno::ENOSYS | Errno::ENOENT)
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
                none
            }
            Opcode::Forget => {
                let request: fuse::ForgetIn = read(input)?;
                self.pool.forget(node, request.nlookup, &*self.workers);
                none
            }
            Opcode::BatchForget => {
                let request: fuse::BatchForgetIn = read(input)?;
                for _ in 0..request.count {
                    let one: fuse::ForgetOne = read(input)?;
                    self.pool.forget(one.nodeid, one.nlookup, &*self.workers);
                }
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

    /// Maps the pool over the whole window.
    fn map_window(&self) -> Result<(), String> {
        if self.mapped.load(Ordering::Acquire) {
            return Ok(());
        }
        // A reset of the device takes the map away, a stop leaves it; the VMM refuses to unmap what is not there.
        self.unmap_window();
        let mut window = held(&self.window);
        let file = Arc::new(self.pool.file().try_clone().map_err(|error| error.to_string())?);
        window.ask(|job| {
            let (id, len) = (self.pool.id(), self.pool.window());
            Job::Map { job, file, id, file_offset: 0, offset: 0, len }
        })?;
        self.mapped.store(true, Ordering::Release);
        Ok(())
    }

    /// Takes the pool out of the window. QEMU 11.1.3 crashes when a guest is reset while anything is in a window, so that
    /// nothing may stay when the file system is unmounted.
    fn unmap_window(&self) {
        self.mapped.store(false, Ordering::Release);
        let (id, len) = (self.pool.id(), self.pool.window());
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
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::SHMEM
    }

    fn reset_device(&self) {
        self.mapped.store(false, Ordering::Release);
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut space = TAG.as_bytes().to_vec();
        space.resize(TAG_BYTES, 0);
        space.extend(1u32.to_le_bytes());
        space.resize(256, 0);
        let end = offset.saturating_add(size);
        space.get(offset as usize..end as usize).map(<[u8]>::to_vec).unwrap_or_default()
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
mod tests {
    use vm_memory::{Bytes, GuestAddress};
    use zerocopy::FromBytes;

    use super::*;

    struct NoWorkers;

    impl Reclaim for NoWorkers {
        fn reclaim(&self, _name: ShareToken) -> bool {
            true
        }
    }

    const NAME: &str = "8000000000000abc";

    struct Kernel {
        device: MemoryDevice,
        ram: Ram,
    }

    impl Kernel {
        fn new(granules: u64) -> Self {
            let pool = Arc::new(Pool::new(granules.saturating_mul(GRANULE)).unwrap());
            let device = MemoryDevice::new(pool, Arc::new(NoWorkers)).unwrap();
            Kernel { device, ram: Ram::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap() }
        }

        fn raw(&self, bytes: &[u8]) -> Option<Vec<u8>> {
            self.ram.write_slice(bytes, GuestAddress(0)).unwrap();
            self.device.request(&mut Input::first(&self.ram, bytes.len().try_into().unwrap()))
        }

        /// Errno or 0, and the body.
        fn ask(&self, opcode: u32, nodeid: u64, body: &[&[u8]]) -> (i32, Vec<u8>) {
            let header = fuse::InHeader { opcode, unique: 77, nodeid, uid: 5, gid: 6, ..Default::default() };
            let bytes = [header.as_bytes(), &body.concat()].concat();
            let answer = self.raw(&bytes).unwrap();
            let (out, body) = fuse::OutHeader::read_from_prefix(&answer).unwrap();
            assert_eq!((out.len as usize, out.unique), (answer.len(), 77));
            (out.error.wrapping_neg(), body.to_vec())
        }

        fn create(&self, name: &str) -> Result<u64, i32> {
            let created = self.ask(35, ROOT, &[fuse::CreateIn::default().as_bytes(), name.as_bytes(), &[0]]);
            match created {
                (0, body) => Ok(fuse::CreateOut::read_from_bytes(&body).unwrap().nodeid),
                (errno, _) => Err(errno),
            }
        }

        fn resize(&self, node: u64, size: u64) -> i32 {
            let request = fuse::SetAttrIn { valid: fuse::SET_SIZE, size, ..Default::default() };
            self.ask(4, node, &[request.as_bytes(), &[0; 64]]).0
        }

        fn place(&self, node: u64, foffset: u64, moffset: u64) -> i32 {
            let request =
                fuse::SetupMappingIn { foffset, len: GRANULE, flags: 3, moffset, ..Default::default() };
            self.ask(48, node, &[request.as_bytes()]).0
        }
    }

    #[test]
    fn a_file_from_its_making_to_its_end() {
        let kernel = Kernel::new(4);
        let node = kernel.create(NAME).unwrap();
        assert_eq!(kernel.create(NAME), Err(Errno::EEXIST as i32));
        assert_eq!(kernel.ask(1, ROOT, &[NAME.as_bytes(), &[0]]).0, Errno::ENOENT as i32, "not opened again");
        assert_eq!(kernel.resize(node, GRANULE + 1), 0);
        let (_, body) = kernel.ask(3, node, &[&[0; 16]]);
        let attr = fuse::AttrOut::read_from_bytes(&body).unwrap().attr;
        assert_eq!((attr.size, attr.mode, attr.nlink), (GRANULE + 1, 0o100_600, 0));
        assert_eq!((attr.uid, attr.gid), (5, 6));
        assert_eq!((kernel.place(node, 0, GRANULE), kernel.place(node, GRANULE, 3 * GRANULE)), (0, 0));
        let claimed = kernel.device.pool.claim(ShareToken(0x8000_0000_0000_0abc));
        assert_eq!(claimed, Some(vec![GRANULE, 3 * GRANULE]));
        let places = [GRANULE, 3 * GRANULE].map(|moffset| fuse::RemoveMappingOne { moffset, len: GRANULE });
        let body = [&2u32.to_le_bytes()[..], places.as_bytes()].concat();
        assert_eq!(kernel.ask(49, node, &[&body]).0, 0);
        let forget = fuse::InHeader { opcode: 2, nodeid: node, ..Default::default() };
        let bytes = [forget.as_bytes(), &1u64.to_le_bytes()].concat();
        assert_eq!(kernel.raw(&bytes), None, "no answer");
        assert_eq!(kernel.device.pool.space(), (4 * GRANULE, 4 * GRANULE));
        assert_eq!(kernel.ask(3, node, &[&[0; 16]]).0, Errno::ENOENT as i32);
    }

    #[test]
    fn names_that_are_no_tokens_are_refused() {
        let kernel = Kernel::new(4);
        for name in [
            "",
            "8",
            "0000000000000abc",
            "8000000000000ABC",
            "+000000000000abc",
            "8000000000000abcd",
            "../../../../../x",
        ] {
            assert_eq!(kernel.create(name), Err(Errno::EINVAL as i32), "{name}");
        }
        // No name at all, and a node that is no directory.
        assert_eq!(kernel.ask(35, ROOT, &[fuse::CreateIn::default().as_bytes()]).0, Errno::EINVAL as i32);
        let node = kernel.create(NAME).unwrap();
        let create = fuse::CreateIn::default();
        let body = [create.as_bytes(), NAME.as_bytes(), &[0]];
        assert_eq!(kernel.ask(35, node, &body).0, Errno::ENOTDIR as i32);
    }

    #[test]
    fn what_the_kernel_may_not_do() {
        let kernel = Kernel::new(4);
        let node = kernel.create(NAME).unwrap();
        assert_eq!(kernel.resize(node, 5 * GRANULE), Errno::ENOSPC as i32);
        assert_eq!(kernel.resize(ROOT, GRANULE), Errno::EPERM as i32);
        let mode = fuse::SetAttrIn { valid: 1, ..Default::default() };
        assert_eq!(kernel.ask(4, node, &[mode.as_bytes()]).0, Errno::EPERM as i32);
        let short = fuse::SetupMappingIn { len: 4096, ..Default::default() };
        assert_eq!(kernel.ask(48, node, &[short.as_bytes()]).0, Errno::EINVAL as i32);
        // Reading, listing, links, names from the future: what is not there.
        for opcode in [5, 6, 8, 9, 10, 12, 13, 14, 15, 16, 22, 27, 28, 43, 51, 4096, u32::MAX] {
            assert_eq!(kernel.ask(opcode, node, &[&[0xff; 64]]).0, Errno::ENOSYS as i32, "{opcode}");
        }
        // Too short for a header: nothing can be said.
        assert_eq!(kernel.raw(&[0; 39]), None);
        // More places than follow.
        assert_eq!(kernel.ask(49, node, &[&u32::MAX.to_le_bytes()]).0, Errno::EINVAL as i32);
    }

    #[test]
    fn a_kernel_without_dax_and_a_vmm_without_a_window_are_told() {
        let kernel = Kernel::new(4);
        let init = |minor, flags| {
            let request = fuse::InitIn { major: 7, minor, max_readahead: 0, flags };
            kernel.ask(26, 0, &[request.as_bytes(), &[0; 48]]).0
        };
        assert_eq!(init(30, fuse::FLAG_MAP_ALIGNMENT), Errno::EPROTO as i32);
        assert_eq!(init(38, 0), Errno::EPROTO as i32);
        assert_eq!(init(38, fuse::FLAG_MAP_ALIGNMENT), Errno::EIO as i32, "it gave no channel");
    }
}
