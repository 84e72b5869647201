//! A VMM in some hundred lines: guest memory, two virtqueues, the shared memory window.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserMMap, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::daemon::{Daemon, wait_for_some};

/// Descriptors of a queue.
pub const QUEUE: u16 = 256;
/// Guest-physical addresses: low memory, and memory beyond the hole below 4 GiB.
pub const LOW: u64 = 0;
pub const LOW_SIZE: u64 = 32 << 20;
pub const HIGH: u64 = 4 << 30;
pub const HIGH_SIZE: u64 = 16 << 20;
/// Where the guest sees the window.
pub const WINDOW: u64 = 16 << 30;

const RINGS: u64 = 0x10_0000;
const RING_BYTES: u64 = 0x1_0000;
const SLOTS: u64 = 0x20_0000;
const SLOT: u64 = 0x2000;
/// Memory that tests use as they like, to the end of low memory.
pub const SCRATCH: u64 = 0x100_0000;

pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
pub const INDIRECT_DESC: u64 = 1 << 28;
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRGL, RESOURCE_BLOB, CONTEXT_INIT
pub const GPU_FEATURES: u64 = 1 | 1 << 3 | 1 << 4;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub type Mem = GuestMemoryMmap<()>;

/// A descriptor as it stands in the table.
#[derive(Clone, Copy)]
pub struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

impl Desc {
    pub fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A virtqueue, seen from the driver.
pub struct Queue {
    base: u64,
    pub avail: u16,
    seen: u16,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Queue {
    fn new(index: usize) -> Self {
        let base = RINGS + index as u64 * RING_BYTES;
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        Queue { base, avail: 0, seen: 0, kick: event(), call: event() }
    }

    pub fn table(&self) -> u64 {
        self.base
    }

    pub fn avail_ring(&self) -> u64 {
        self.base + 0x4000
    }

    pub fn used_ring(&self) -> u64 {
        self.base + 0x8000
    }

    pub fn set_desc(&self, mem: &Mem, index: u16, desc: Desc) {
        mem.write_slice(&desc.bytes(), GuestAddress(self.table() + u64::from(index) * 16)).unwrap();
    }

    /// Makes a chain available without telling the device.
    pub fn offer(&mut self, mem: &Mem, head: u16) {
        let place = self.avail_ring() + 4 + u64::from(self.avail % QUEUE) * 2;
        mem.write_obj(head, GuestAddress(place)).unwrap();
        self.avail = self.avail.wrapping_add(1);
        self.publish(mem, self.avail);
    }

    pub fn publish(&self, mem: &Mem, index: u16) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        mem.write_obj(index, GuestAddress(self.avail_ring() + 2)).unwrap();
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// The next chain that the device gave back: its head and the bytes written.
    pub fn used(&mut self, mem: &Mem) -> Option<(u16, u32)> {
        let index: u16 = mem.read_obj(GuestAddress(self.used_ring() + 2)).unwrap();
        if index == self.seen {
            return None;
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let place = self.used_ring() + 4 + u64::from(self.seen % QUEUE) * 8;
        self.seen = self.seen.wrapping_add(1);
        let head: u32 = mem.read_obj(GuestAddress(place)).unwrap();
        let len: u32 = mem.read_obj(GuestAddress(place + 4)).unwrap();
        Some((head as u16, len))
    }
}

/// What the device has mapped, by offset in the window.
#[derive(Default)]
pub struct Maps {
    pub live: Mutex<BTreeMap<u64, Map>>,
    /// Unmaps of what is not mapped; QEMU closes the channel for that, or crashes.
    pub refused: AtomicUsize,
    frontend: Mutex<Option<Frontend>>,
}

pub struct Map {
    pub file: File,
    pub offset: u64,
    pub len: u64,
    addr: u64,
}

impl Map {
    fn region(&self, at: u64) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: WINDOW + at,
            memory_size: self.len,
            userspace_addr: self.addr,
            mmap_offset: self.offset,
            mmap_handle: self.file.as_raw_fd(),
        }
    }
}

struct MapHandler(Arc<Maps>);

impl VhostUserFrontendReqHandler for MapHandler {
    /// As QEMU does it: the map becomes a region and comes back over the main channel before the answer.
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        let VhostUserMMap { fd_offset, shm_offset, len, .. } = *request;
        #[allow(unsafe_code)] // the trait gives a raw descriptor
        // SAFETY: the descriptor is open for as long as `fd` lives, and is copied here.
        let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        let file = File::from(file.try_clone_to_owned().unwrap());
        // An address that nothing else in the table has.
        let map = Map { file, offset: fd_offset, len, addr: 0x7000_0000_0000 + shm_offset };
        let mut live = self.0.live.lock().unwrap();
        if live.contains_key(&shm_offset) {
            return Err(std::io::Error::other("mapped already"));
        }
        if let Some(frontend) = self.0.frontend.lock().unwrap().as_mut() {
            frontend.add_mem_region(&map.region(shm_offset)).unwrap();
        }
        live.insert(shm_offset, map);
        Ok(0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        let at = request.shm_offset;
        let map = self.0.live.lock().unwrap().remove(&at);
        let Some(map) = map else {
            self.0.refused.fetch_add(1, Ordering::SeqCst);
            return Err(std::io::Error::other("not mapped"));
        };
        if let Some(frontend) = self.0.frontend.lock().unwrap().as_mut() {
            frontend.remove_mem_region(&map.region(at)).unwrap();
        }
        Ok(0)
    }
}

/// How the VMM sets the device up.
#[derive(Clone, Copy)]
pub struct Setup {
    pub features: u64,
    pub window: bool,
    /// As with QEMU, a map becomes a memory region of the device too; with crosvm it does not.
    pub come_back: bool,
    pub base: u16,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { features: GPU_FEATURES | INDIRECT_DESC, window: true, come_back: true, base: 0 }
    }
}

pub struct Vmm {
    pub frontend: Frontend,
    pub mem: Mem,
    pub control: Queue,
    pub cursor: Queue,
    pub maps: Arc<Maps>,
    pub window: u64,
    next_slot: u16,
}

pub fn memfd(size: u64) -> Arc<File> {
    let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    Arc::new(file)
}

/// Guest memory over a file: low memory first.
pub fn map_ram(file: &Arc<File>) -> Mem {
    let part =
        |base, size, at| (GuestAddress(base), size as usize, Some(FileOffset::from_arc(file.clone(), at)));
    Mem::from_ranges_with_files([part(LOW, LOW_SIZE, 0), part(HIGH, HIGH_SIZE, LOW_SIZE)]).unwrap()
}

impl Vmm {
    /// Connects and starts the device, as a guest's driver would have it.
    pub fn connect(daemon: &Daemon) -> Self {
        Self::set_up(daemon.connect(), Setup::default())
    }

    pub fn set_up(stream: UnixStream, setup: Setup) -> Self {
        let mut frontend = Frontend::from_stream(stream, 2);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let wanted = setup.features | VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        assert_eq!(offered & wanted, wanted, "features offered: {offered:#x}");
        let mut protocol = frontend.get_protocol_features().unwrap();
        if !setup.window {
            protocol.remove(VhostUserProtocolFeatures::SHMEM);
        }
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);

        let maps = Arc::new(Maps::default());
        let mut handler = FrontendReqHandler::new(Arc::new(MapHandler(maps.clone()))).unwrap();
        handler.set_reply_ack_flag(true);
        #[allow(unsafe_code)] // the crate gives a raw descriptor
        // SAFETY: the handler keeps the descriptor open until its thread begins, below.
        let end = unsafe { std::os::fd::BorrowedFd::borrow_raw(handler.get_tx_raw_fd()) };
        let end = end.try_clone_to_owned().unwrap();
        frontend.set_backend_request_fd(&end).unwrap();
        drop(end);
        let mut window = 0;
        if setup.window {
            window = frontend.get_shmem_config().unwrap().memory_sizes[1];
        }
        if setup.window && setup.come_back {
            *maps.frontend.lock().unwrap() = Some(frontend.clone());
        }
        // The thread is left behind, blocked, when the test ends.
        std::thread::spawn(move || while handler.handle_request().is_ok() {});

        let file = memfd(LOW_SIZE + HIGH_SIZE);
        let mem = map_ram(&file);
        let mut vmm =
            Vmm { frontend, mem, control: Queue::new(0), cursor: Queue::new(1), maps, window, next_slot: 0 };
        vmm.start(setup);
        vmm
    }

    /// What a VMM does when the driver says DRIVER_OK.
    pub fn start(&mut self, setup: Setup) {
        let features =
            setup.features | VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.frontend.set_features(features).unwrap();
        self.send_table();
        for (index, queue) in [&mut self.control, &mut self.cursor].into_iter().enumerate() {
            queue.avail = setup.base;
            queue.seen = setup.base;
            self.mem.write_obj(setup.base, GuestAddress(queue.used_ring() + 2)).unwrap();
            queue.publish(&self.mem, setup.base);
            self.frontend.set_vring_num(index, QUEUE).unwrap();
        }
        self.send_addresses();
        for (index, queue) in [&self.control, &self.cursor].into_iter().enumerate() {
            self.frontend.set_vring_base(index, setup.base).unwrap();
            self.frontend.set_vring_call(index, &queue.call).unwrap();
            self.frontend.set_vring_kick(index, &queue.kick).unwrap();
            self.frontend.set_vring_enable(index, true).unwrap();
        }
    }

    /// What QEMU does with its maps when the guest's device is reset.
    pub fn drop_maps(&mut self) {
        self.maps.live.lock().unwrap().clear();
    }

    pub fn send_table(&self) {
        let mut table: Vec<_> = self
            .mem
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        let live = self.maps.live.lock().unwrap();
        if self.maps.frontend.lock().unwrap().is_some() {
            table.extend(live.iter().map(|(at, map)| map.region(*at)));
        }
        self.frontend.set_mem_table(&table).unwrap();
    }

    pub fn send_addresses(&self) {
        for (index, queue) in [&self.control, &self.cursor].into_iter().enumerate() {
            let host = |gpa| self.mem.get_host_address(GuestAddress(gpa)).unwrap() as u64;
            let config = VringConfigData {
                queue_max_size: QUEUE,
                queue_size: QUEUE,
                flags: 0,
                desc_table_addr: host(queue.table()),
                avail_ring_addr: host(queue.avail_ring()),
                used_ring_addr: host(queue.used_ring()),
                log_addr: None,
            };
            self.frontend.set_vring_addr(index, &config).unwrap();
        }
    }

    /// Puts a command on the control queue and tells the device. Returns the head of its chain.
    pub fn submit(&mut self, command: &[u8]) -> u16 {
        let head = self.prepare(command);
        self.control.offer(&self.mem, head);
        self.control.kick();
        head
    }

    /// Writes a command into a slot and its two descriptors into the table. Long commands need the scratch memory.
    fn prepare(&mut self, command: &[u8]) -> u16 {
        let head = self.next_slot * 2;
        self.next_slot = (self.next_slot + 1) % (QUEUE / 2);
        let slot = SLOTS + u64::from(head) * SLOT;
        assert!(command.len() as u64 <= SLOT - 0x400, "{} bytes", command.len());
        self.mem.write_slice(command, GuestAddress(slot)).unwrap();
        let answer = slot + SLOT - 0x400;
        self.mem.write_slice(&[0xee; 0x400], GuestAddress(answer)).unwrap();
        let desc = |addr, len, flags, next| Desc { addr, len, flags, next };
        self.control.set_desc(&self.mem, head, desc(slot, command.len() as u32, NEXT, head + 1));
        self.control.set_desc(&self.mem, head + 1, desc(answer, 0x400, WRITE, 0));
        head
    }

    /// As [`Vmm::submit`], with the command at any place in guest memory.
    pub fn submit_at(&mut self, address: u64, len: u32) -> u16 {
        let head = self.prepare(&[]);
        let desc = Desc { addr: address, len, flags: NEXT, next: head + 1 };
        self.control.set_desc(&self.mem, head, desc);
        self.control.offer(&self.mem, head);
        self.control.kick();
        head
    }

    /// As [`Vmm::submit`], with one descriptor of the ring, so that more can be in flight. The response is not kept.
    pub fn submit_in_table(&mut self, head: u16, command: &[u8]) {
        let place = LOW_SIZE - (u64::from(head) + 1) * 0x1000;
        self.write(place, command);
        let (table, answer) = (place + 0xc00, place + 0xe00);
        let desc = |addr, len, flags, next| Desc { addr, len, flags, next };
        self.write(table, &desc(place, command.len() as u32, NEXT, 1).bytes());
        self.write(table + 16, &desc(answer, 0x100, WRITE, 0).bytes());
        self.control.set_desc(&self.mem, head, desc(table, 32, INDIRECT, 0));
        self.control.offer(&self.mem, head);
        self.control.kick();
    }

    /// The response of a chain that has come back.
    fn response(&self, head: u16, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let place = SLOTS + u64::from(head) * SLOT + SLOT - 0x400;
        self.mem.read_slice(&mut bytes, GuestAddress(place)).unwrap();
        bytes
    }

    /// The next command that came back: its head and the response.
    pub fn next_response(&mut self) -> (u16, Vec<u8>) {
        let (head, len) = wait_for_some("a response", || self.control.used(&self.mem));
        (head, self.response(head, len))
    }

    /// What has come back by now.
    pub fn try_response(&mut self) -> Option<(u16, Vec<u8>)> {
        let (head, len) = self.control.used(&self.mem)?;
        Some((head, self.response(head, len)))
    }

    /// One command and its response; nothing else may be in flight.
    pub fn command(&mut self, command: &[u8]) -> Vec<u8> {
        let head = self.submit(command);
        let (back, bytes) = self.next_response();
        assert_eq!(back, head);
        bytes
    }

    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    /// Reads through the window.
    pub fn read_window(&self, offset: u64, len: usize) -> Vec<u8> {
        let live = self.maps.live.lock().unwrap();
        let (at, map) = live.range(..=offset).next_back().unwrap();
        let mut bytes = vec![0; len];
        map.file.read_exact_at(&mut bytes, map.offset + offset - at).unwrap();
        bytes
    }
}

impl Vmm {
    /// Closes the main channel, whoever else holds it (the thread that serves the window does).
    pub fn disconnect(&self) {
        // Fails if the device has closed it.
        let _ = nix::sys::socket::shutdown(self.frontend.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.disconnect();
    }
}

/// An inherited descriptor for a child process: without close-on-exec.
pub fn inheritable(stream: UnixStream) -> OwnedFd {
    let fd = OwnedFd::from(stream);
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
    fd
}
