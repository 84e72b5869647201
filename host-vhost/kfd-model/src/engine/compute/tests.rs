//! Kernels made by hand; the words are those of LLVM's assembler for gfx906.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_isa::Target;

use super::*;
use crate::arena::{Arena, PAGE};
use crate::engine::dispatch::{AqlDispatch, RegisterDispatch, SH_REGISTERS};
use crate::engine::fake::FakeWorld;
use crate::engine::view::{PageTable, View, next_generation};
use crate::engine::{DispatchFailure, Interrupt, Memory};
use crate::space::{AddressSpace, Backing, Fault, FaultReason, Mapping};

struct Table {
    space: RwLock<AddressSpace>,
    generation: std::sync::atomic::AtomicU64,
}

impl PageTable for Table {
    fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        self.space.read().unwrap()
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }
}

impl Table {
    fn change(&self) -> RwLockWriteGuard<'_, AddressSpace> {
        let space = self.space.write().unwrap();
        self.generation.store(next_generation(), Ordering::Relaxed);
        space
    }
}

const ALL: VmPageFlags =
    VmPageFlags::PAGE_READABLE.union(VmPageFlags::PAGE_WRITEABLE).union(VmPageFlags::PAGE_EXECUTABLE);

/// Where things lie: 16 pages of each.
const CODE: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const QUEUE: u64 = 0x30_0000;
const SCRATCH: u64 = 0x40_0000;
const USER: u64 = 0x50_0000;
const PAGES: u64 = 16;

/// User SGPRs: the address of the arguments in s[0:1]; then the number of the workgroup in s2.
const KERNARG: u32 = 1 << 3;
const RSRC2: u32 = 2 << 1 | 1 << 7;

struct Gpu {
    table: Arc<Table>,
    view: View<Arc<Table>>,
    world: Arc<FakeWorld>,
    compute: Compute,
    units: Arc<Units>,
    stop: AtomicBool,
    evicted: AtomicBool,
    _user: Vec<u8>,
    user: u64,
}

impl Gpu {
    fn new(threads: usize) -> Self {
        let arena = Arc::new(Arena::new("test", 1 << 24).unwrap());
        let mut space = AddressSpace::default();
        for va in [CODE, DATA, QUEUE, SCRATCH] {
            let backing =
                Backing::Arena { arena: arena.clone(), offset: arena.allocate(PAGES * PAGE).unwrap() };
            space.map(va, Mapping { size: PAGES * PAGE, backing, object: 0, flags: ALL }).unwrap();
        }
        let memory = vec![0u8; 3 * PAGE as usize];
        let user = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
        let mapping = |backing| Mapping { size: PAGE, backing, object: 0, flags: ALL };
        space.map(USER, mapping(Backing::User(user))).unwrap();
        space.map(USER + PAGE, mapping(Backing::User(PAGE))).unwrap();
        let table = Arc::new(Table { space: RwLock::new(space), generation: next_generation().into() });
        let world = Arc::new(FakeWorld::default());
        let profile = crate::profile::Profile::load("gfx906").unwrap();
        let units = Arc::new(Units::new(&profile.gpu[0].shader));
        let machine = Machine {
            gpu_id: 1,
            table: Arc::new(table.clone()),
            world: world.clone(),
            target: Target::Gfx906,
            units: units.clone(),
        };
        let compute = Compute::new(machine, Arc::new(Pool::with_threads(threads)));
        let view = View::new(1, table.clone());
        let (stop, evicted) = Default::default();
        Self { table, view, world, compute, units, stop, evicted, _user: memory, user }
    }

    fn memory(&self) -> &dyn Memory {
        &self.view
    }

    fn put(&self, va: u64, words: &[u32]) {
        for (index, word) in words.iter().enumerate() {
            self.memory().store32(va + 4 * index as u64, *word).unwrap();
        }
    }

    fn word(&self, va: u64) -> u32 {
        self.memory().load32(va).unwrap()
    }

    /// A kernel: its descriptor at [`CODE`], its code 256 bytes behind.
    fn kernel(&self, rsrc2: u32, properties: u32, code: &[u32]) {
        self.put(CODE + 16, &[256, 0]);
        self.put(CODE + 48, &[7, rsrc2, properties]);
        self.put(CODE + 256, code);
    }

    fn context(&self) -> Context<'_> {
        Context {
            memory: &self.view,
            world: self.world.as_ref(),
            dispatcher: &self.compute,
            stop: &self.stop,
            evicted: &self.evicted,
        }
    }

    fn run(&self, dispatch: &AqlDispatch) -> Result<Dispatched, Failure> {
        self.compute.dispatch(&Dispatch::Aql(dispatch), &self.context())
    }
}

/// A dispatch of so many work-items with arguments at an address.
fn packet(items: u32, workgroup: u32, arguments: u64) -> AqlDispatch {
    let mut packet = [0u32; 16];
    packet[0] = 2 | 1 << 16;
    packet[1] = workgroup;
    packet[3] = items;
    packet[8] = CODE as u32;
    packet[10] = arguments as u32;
    packet[11] = (arguments >> 32) as u32;
    AqlDispatch { packet, packet_address: QUEUE + 0x1000, index: 5, amd_queue: Some(QUEUE) }
}

const ENDPGM: u32 = 0xbf81_0000; // s_endpgm

/// Stores each work-item's number at its place; arguments: address, work-items of a workgroup.
const NUMBERS: [u32; 11] = [
    0xc006_0100,
    0x0000_0000, // s_load_dwordx2 s[4:5], s[0:1], 0x0
    0xc002_0180,
    0x0000_0008, // s_load_dword s6, s[0:1], 0x8
    0xbf8c_c07f, // s_waitcnt lgkmcnt(0)
    0x9207_0602, // s_mul_i32 s7, s2, s6
    0x6802_0007, // v_add_u32_e32 v1, s7, v0
    0x2404_0282, // v_lshlrev_b32_e32 v2, 2, v1
    0xdc70_8000,
    0x0004_0102, // global_store_dword v2, v1, s[4:5]
    ENDPGM,
];

/// Adds 1 at the arguments, then spins until the word behind is not 0.
const WAITS: [u32; 9] = [
    0x7e02_0280, // v_mov_b32_e32 v1, 0
    0x7e04_0281, // v_mov_b32_e32 v2, 1
    0xdd08_8000,
    0x0000_0201, // global_atomic_add v1, v2, s[0:1]
    0xdc51_8004,
    0x0300_0001, // global_load_dword v3, v1, s[0:1] offset:4 glc
    0x7d9a_0680, // v_cmp_ne_u32_e32 vcc, 0, v3
    0xbf86_fffc, // s_cbranch_vccz -4
    ENDPGM,
];

/// Runs `body` beside a thread that runs `other`.
fn beside<T>(other: impl FnOnce() + Send, body: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        scope.spawn(other);
        body()
    })
}

#[test]
fn each_work_item_runs_once() {
    for threads in [0, 2] {
        let gpu = Gpu::new(threads);
        gpu.kernel(RSRC2, KERNARG, &NUMBERS);
        gpu.put(DATA, &[DATA as u32 + 0x1000, 0, 192]);
        assert_eq!(gpu.run(&packet(5000, 192, DATA)), Ok(Dispatched::Done));
        for item in 0..5000 {
            assert_eq!(gpu.word(DATA + 0x1000 + 4 * u64::from(item)), item);
        }
        assert_eq!(gpu.word(DATA + 0x1000 + 4 * 5000), 0, "the last workgroup is smaller");
    }
}

/// Stores where each workgroup runs at its number's place: the kernel of rocrtst's test of masks, HW_ID from bit 8 on, 7 bits.
const WHERE: [u32; 8] = [
    0xc006_0100,
    0x0000_0000, // s_load_dwordx2 s[4:5], s[0:1], 0x0
    0xb886_3204, // s_getreg_b32 s6, hwreg(HW_REG_HW_ID, 8, 7)
    0x8e07_8202, // s_lshl_b32 s7, s2, 2
    0x7e02_0207, // v_mov_b32_e32 v1, s7
    0x7e04_0206, // v_mov_b32_e32 v2, s6
    0xbf8c_c07f, // s_waitcnt lgkmcnt(0)
    0xdc70_8000, // global_store_dword v1, v2, s[4:5]
];

#[test]
fn workgroups_are_on_the_units_that_the_queue_may_use() {
    let gpu = Gpu::new(2);
    let mut code = WHERE.to_vec();
    code.extend([0x0004_0201, ENDPGM]);
    gpu.kernel(RSRC2, KERNARG, &code);
    gpu.put(DATA, &[DATA as u32 + 0x1000, 0]);
    let places = || {
        assert_eq!(gpu.run(&packet(64 * 240, 64, DATA)), Ok(Dispatched::Done));
        let places: std::collections::BTreeMap<u32, u32> =
            (0..240).fold(Default::default(), |mut places, group| {
                *places.entry(gpu.word(DATA + 0x1000 + 4 * group)).or_default() += 1;
                places
            });
        places
    };
    let all = places();
    // Vega 20 with 60 units: 15 in each of four engines; four workgroups for each.
    assert_eq!((all.len(), all.values().all(|groups| *groups == 4)), (60, true), "{all:?}");
    assert_eq!(all.keys().filter(|place| **place >> 5 == 3).count(), 15);
    gpu.units.mask(&[0xff]);
    assert_eq!(places().into_keys().collect::<Vec<_>>(), [0, 1, 1 << 5, 33, 2 << 5, 65, 3 << 5, 97]);
    gpu.units.mask(&[!0xff, u32::MAX]);
    assert_eq!(places().len(), 52);
}

#[test]
fn kernels_read_and_write_memory_of_the_process() {
    let gpu = Gpu::new(0);
    gpu.kernel(RSRC2, KERNARG, &NUMBERS);
    gpu.put(USER, &[USER as u32 + 16, 0, 64]);
    assert_eq!(gpu.run(&packet(100, 64, USER)), Ok(Dispatched::Done));
    assert_eq!(gpu.word(USER + 16 + 4 * 99), 99);
    // Nothing is there any more: a fault, not the end of the process.
    gpu.put(USER, &[USER as u32 + PAGE as u32, 0, 64]);
    let va = USER + PAGE;
    let fault = Fault { gpu_id: 1, va, access: "write", reason: FaultReason::NoBacking };
    assert_eq!(gpu.run(&packet(100, 64, USER)), Err(fault.into()));
    assert_ne!(gpu.user, 0);
}

#[test]
fn new_code_in_the_same_place_is_what_runs() {
    let gpu = Gpu::new(0);
    let store = |value: u32| {
        // v_mov_b32_e32 v1, 0; v_mov_b32_e32 v2, value; global_store_dword v1, v2, s[0:1]
        gpu.kernel(RSRC2, KERNARG, &[0x7e02_0280, 0x7e04_0280 + value, 0xdc70_8000, 0x0000_0201, ENDPGM]);
        assert_eq!(gpu.run(&packet(1, 1, DATA)), Ok(Dispatched::Done));
        gpu.word(DATA)
    };
    assert_eq!([store(7), store(9)], [7, 9]);
}

#[test]
fn what_makes_no_sense_is_refused_before_it_runs() {
    let gpu = Gpu::new(0);
    gpu.kernel(RSRC2, KERNARG, &[ENDPGM]);
    let refused = |change: &dyn Fn(&mut [u32; 16])| {
        let mut dispatch = packet(64, 64, DATA);
        change(&mut dispatch.packet);
        gpu.run(&dispatch).unwrap_err()
    };
    let dimensions: Failure = DispatchFailure::Dimensions.into();
    assert_eq!(refused(&|packet| packet[0] = 2), dimensions);
    assert_eq!(refused(&|packet| packet[1] = 0), dimensions);
    assert_eq!(refused(&|packet| packet[3] = 0), dimensions);
    let size: Failure = DispatchFailure::WorkgroupSize.into();
    assert_eq!(refused(&|packet| packet[1] = 1025), size);
    let cube = |packet: &mut [u32; 16]| {
        (packet[0], packet[1], packet[2]) = (2 | 3 << 16, 0xffff_ffff, 0xffff);
        packet[3..6].fill(u32::MAX);
    };
    assert_eq!(refused(&cube), size);
    assert_eq!(refused(&|packet| packet[7] = 65537), DispatchFailure::GroupSegment.into());
    assert_eq!(refused(&|packet| packet[8] = 0), DispatchFailure::Code { kernel_object: 0 }.into());
    let nowhere = Fault { gpu_id: 1, va: 0x1030, access: "read", reason: FaultReason::NotPresent };
    assert_eq!(refused(&|packet| packet[8] = 0x1000), nowhere.into());
    gpu.put(CODE + 48, &[63]);
    assert_eq!(refused(&|packet| packet[1] = 1024), DispatchFailure::Registers.into());
}

#[test]
fn an_absurd_grid_starts_and_can_be_stopped() {
    let gpu = Gpu::new(2);
    gpu.kernel(RSRC2, KERNARG, &[ENDPGM]);
    let mut dispatch = packet(u32::MAX, 1, DATA);
    dispatch.packet[0] = 2 | 3 << 16;
    (dispatch.packet[1], dispatch.packet[2]) = (1 << 16 | 1, 1);
    dispatch.packet[3..6].fill(u32::MAX);
    let stop = || {
        std::thread::sleep(Duration::from_millis(20));
        gpu.stop.store(true, Ordering::Relaxed);
    };
    assert_eq!(beside(stop, || gpu.run(&dispatch)), Ok(Dispatched::Stopped));
}

#[test]
fn wild_kernels_are_told_by_what_they_did() {
    let gpu = Gpu::new(1);
    let wild = |code: &[u32], arguments| {
        gpu.kernel(RSRC2, KERNARG, code);
        gpu.run(&packet(256, 64, arguments)).unwrap_err()
    };
    // v_mov_b32_e32 v1, 0; global_store_dword v1, v2, s[0:1]
    let store = [0x7e02_0280, 0xdc70_8000, 0x0000_0201, ENDPGM];
    let fault = |va| Fault { gpu_id: 1, va, access: "write", reason: FaultReason::NotPresent };
    assert_eq!(wild(&store, 0xdead_0000), fault(0xdead_0000).into());
    let pc = CODE + 256;
    let aperture = DispatchFailure::Aperture { pc: pc + 4, va: 0xdead << 48 };
    assert_eq!(wild(&store, 0xdead << 48), aperture.into());
    let instruction = 0xffff_ffff;
    assert_eq!(wild(&[instruction], DATA), DispatchFailure::IllegalInstruction { pc, instruction }.into());
    let trap = DispatchFailure::Trap { pc, trap: 2 };
    assert_eq!(wild(&[0xbf92_0002], DATA), trap.into()); // s_trap 2
    // s_setpc_b64 s[0:1]: data that must not be executed.
    let table = gpu.table.clone();
    let flags = VmPageFlags::PAGE_READABLE;
    let mapping = Mapping { size: PAGE, backing: Backing::User(gpu.user), object: 0, flags };
    table.change().map(0x60_0000, mapping).unwrap();
    let reason = FaultReason::NoExecute;
    let no_execute = Fault { gpu_id: 1, va: 0x60_0000, access: "execute", reason };
    assert_eq!(wild(&[0xbe80_1d00], 0x60_0000), no_execute.into());
    let read_only = Fault { gpu_id: 1, va: 0x60_0000, access: "write", reason: FaultReason::ReadOnly };
    assert_eq!(wild(&store, 0x60_0000), read_only.into());
    // And the GPU goes on as before.
    gpu.kernel(RSRC2, KERNARG, &[ENDPGM]);
    assert_eq!(gpu.run(&packet(256, 64, DATA)), Ok(Dispatched::Done));
}

#[test]
fn a_kernel_that_is_stopped_goes_on_where_it_was() {
    let gpu = Gpu::new(1);
    gpu.kernel(RSRC2, KERNARG, &WAITS);
    let stop = || {
        while gpu.word(DATA) < 8 {
            std::thread::yield_now();
        }
        gpu.stop.store(true, Ordering::Relaxed);
    };
    let dispatch = packet(8, 1, DATA);
    assert_eq!(beside(stop, || gpu.run(&dispatch)), Ok(Dispatched::Stopped));
    assert_eq!(gpu.run(&dispatch), Ok(Dispatched::Stopped));
    gpu.stop.store(false, Ordering::Relaxed);
    let release = || gpu.put(DATA + 4, &[1]);
    assert_eq!(beside(release, || gpu.run(&dispatch)), Ok(Dispatched::Done));
    assert_eq!(gpu.word(DATA), 8, "no workgroup began twice");
}

#[test]
fn a_kernel_gets_as_many_threads_as_it_has_work_for() {
    let gpu = Gpu::new(3);
    gpu.kernel(RSRC2, KERNARG, &WAITS);
    let release = || {
        while gpu.word(DATA) < 2 {
            std::thread::yield_now();
        }
        assert_eq!(gpu.compute.pool.threads(), 1, "and the queue's own");
        gpu.put(DATA + 4, &[1]);
    };
    assert_eq!(beside(release, || gpu.run(&packet(2, 1, DATA))), Ok(Dispatched::Done));
    gpu.put(DATA + 4, &[0]);
    let release = || {
        while gpu.word(DATA) < 10 {
            std::thread::yield_now();
        }
        assert_eq!(gpu.compute.pool.threads(), 3, "no more than the pool has");
        gpu.put(DATA + 4, &[1]);
    };
    assert_eq!(beside(release, || gpu.run(&packet(8, 1, DATA))), Ok(Dispatched::Done));
}

#[test]
fn an_eviction_stops_a_kernel_too() {
    let gpu = Gpu::new(0);
    gpu.kernel(RSRC2, KERNARG, &[0xbf82_ffff]); // s_branch -1
    let evict = || gpu.evicted.store(true, Ordering::Relaxed);
    assert_eq!(beside(evict, || gpu.run(&packet(1, 1, DATA))), Ok(Dispatched::Stopped));
}

#[test]
fn workgroups_wait_for_one_another_on_one_thread() {
    let gpu = Gpu::new(0);
    let mut code = WAITS;
    code[4] = 0xdc51_8000; // global_load_dword v3, v1, s[0:1] glc
    code[6] = 0x7d94_0684; // v_cmp_eq_u32_e32 vcc, 4, v3
    gpu.kernel(RSRC2, KERNARG, &code);
    assert_eq!(gpu.run(&packet(4, 1, DATA)), Ok(Dispatched::Done));
}

#[test]
fn memory_that_is_unmapped_is_out_of_reach_at_once() {
    let gpu = Gpu::new(0);
    // v_mov_b32_e32 v1, 0; v_mov_b32_e32 v2, 1; global_store_dword v1, v2, s[0:1]; s_branch -3
    gpu.kernel(RSRC2, KERNARG, &[0x7e02_0280, 0x7e04_0281, 0xdc70_8000, 0x0000_0201, 0xbf82_fffd]);
    let unmap = || {
        while gpu.word(DATA) == 0 {
            std::thread::yield_now();
        }
        gpu.table.change().unmap(DATA, 0).unwrap();
    };
    let fault = Fault { gpu_id: 1, va: DATA, access: "write", reason: FaultReason::NotPresent };
    assert_eq!(beside(unmap, || gpu.run(&packet(1, 1, DATA))), Err(fault.into()));
}

// C79: exact with several waves and a CPU on the same word.
#[test]
fn atomic_operations_of_waves_and_cpus_are_exact() {
    let gpu = Gpu::new(2);
    gpu.kernel(
        RSRC2,
        KERNARG,
        &[
            0xb002_03e8, // s_movk_i32 s2, 0x3e8
            0x7e02_0280, // v_mov_b32_e32 v1, 0
            0x7e04_0281, // v_mov_b32_e32 v2, 1
            0xdd0c_8000,
            0x0000_0201, // global_atomic_sub v1, v2, s[0:1]
            0x8082_8102, // s_sub_u32 s2, s2, 1
            0xbf07_8002, // s_cmp_lg_u32 s2, 0
            0xbf85_fffb, // s_cbranch_scc1 -5
            ENDPGM,
        ],
    );
    for va in [DATA, USER] {
        gpu.put(va, &[4 * 64 * 1000 + 1000]);
        let decrement = || {
            for _ in 0..1000 {
                gpu.memory().update32(va, &mut |word| word.fetch_sub(1, Ordering::Relaxed)).unwrap();
            }
        };
        assert_eq!(beside(decrement, || gpu.run(&packet(256, 64, va))), Ok(Dispatched::Done));
        assert_eq!(gpu.word(va), 0);
    }
}

/// Writes each lane's number to its private memory, reads it back and stores it at the arguments. s[0:3] describe the
/// scratch buffer, s[4:5] the arguments, s6 is the wave's offset.
const PRIVATE: [u32; 10] = [
    0x8000_0600, // s_add_u32 s0, s0, s6
    0x8201_8001, // s_addc_u32 s1, s1, 0
    0xe070_0008,
    0x8000_0000, // buffer_store_dword v0, off, s[0:3], 0 offset:8
    0xe050_0008,
    0x8000_0100, // buffer_load_dword v1, off, s[0:3], 0 offset:8
    0x2404_0082, // v_lshlrev_b32_e32 v2, 2, v0
    0xdc70_8000,
    0x0004_0102, // global_store_dword v2, v1, s[4:5]
    ENDPGM,
];

#[test]
fn private_memory_is_the_queues_scratch() {
    let gpu = Gpu::new(0);
    gpu.kernel(6 << 1 | 1, 1 | KERNARG, &PRIVATE);
    let mut dispatch = packet(128, 128, DATA);
    dispatch.packet[6] = 32;
    // The queue has none, or not enough for the waves of a workgroup, or for a wave.
    let asked = Ok(Dispatched::InsufficientScratch { wave32: false });
    for tmpring in [0, 2 << 12 | 1, 1 << 12 | 64] {
        gpu.put(QUEUE + 140, &[tmpring]);
        assert_eq!(gpu.run(&dispatch), asked);
    }
    // Two waves of 2 KiB each.
    gpu.put(QUEUE + 140, &[2 << 12 | 2]);
    gpu.put(QUEUE + 144, &[SCRATCH as u32, 1 << 31, 4096, 0x00ea_4fac]);
    assert_eq!(gpu.run(&dispatch), Ok(Dispatched::Done));
    for item in [0, 63, 64, 127] {
        assert_eq!(gpu.word(DATA + 4 * item), item as u32);
    }
    // Words of the lanes next to each other, the second wave's behind those of the first.
    let second = if gpu.word(SCRATCH + 2 * 256 + 4) == 1 { SCRATCH + 2048 } else { SCRATCH };
    assert_eq!(gpu.word(second + 2 * 256 + 4 * 7), 71);
}

#[test]
fn dispatches_of_registers_run() {
    let gpu = Gpu::new(0);
    gpu.kernel(RSRC2, KERNARG, &NUMBERS);
    gpu.put(DATA, &[DATA as u32 + 0x1000, 0, 64]);
    let mut registers = [0u32; SH_REGISTERS];
    registers[0x207..0x20a].fill(1);
    registers[0x207] = 64;
    registers[0x20c] = (CODE as u32 + 256) >> 8;
    registers[0x212] = 7;
    registers[0x213] = RSRC2;
    registers[0x240] = DATA as u32;
    let mut dispatch = RegisterDispatch { registers: &registers, dimensions: [3, 1, 1], initiator: 1 };
    let run =
        |dispatch: RegisterDispatch<'_>| gpu.compute.dispatch(&Dispatch::Registers(dispatch), &gpu.context());
    assert_eq!(run(dispatch), Ok(Dispatched::Done));
    assert_eq!((gpu.word(DATA + 0x1000 + 4 * 191), gpu.word(DATA + 0x1000 + 4 * 192)), (191, 0));
    // USE_THREAD_DIMENSIONS
    (dispatch.dimensions, dispatch.initiator) = ([200, 1, 1], 1 | 1 << 5);
    assert_eq!(run(dispatch), Ok(Dispatched::Done));
    assert_eq!((gpu.word(DATA + 0x1000 + 4 * 199), gpu.word(DATA + 0x1000 + 4 * 200)), (199, 0));
    // Scratch memory for one wave, and a workgroup of two.
    (registers[0x207], registers[0x213], registers[0x218]) = (128, RSRC2 | 1, 1 << 12 | 1);
    let dispatch = RegisterDispatch { registers: &registers, dimensions: [1, 1, 1], initiator: 1 };
    assert_eq!(run(dispatch), Ok(Dispatched::InsufficientScratch { wave32: false }));
}

#[test]
fn a_message_is_an_interrupt() {
    let gpu = Gpu::new(0);
    // s_mov_b32 m0, 7; s_sendmsg sendmsg(MSG_INTERRUPT)
    gpu.kernel(RSRC2, KERNARG, &[0xbefc_0087, 0xbf90_0001, ENDPGM]);
    assert_eq!(gpu.run(&packet(1, 1, DATA)), Ok(Dispatched::Done));
    assert_eq!(*gpu.world.interrupts.lock().unwrap(), [Interrupt::Wave(7)]);
}

#[test]
fn waves_of_all_kernels_are_counted_and_forgotten() {
    let gpu = Gpu::new(1);
    gpu.kernel(RSRC2, KERNARG, &WAITS);
    let waves = gpu.compute.pool.waves();
    let stop = || {
        while gpu.word(DATA) < 4 {
            std::thread::yield_now();
        }
        gpu.stop.store(true, Ordering::Relaxed);
    };
    assert_eq!(beside(stop, || gpu.run(&packet(4, 1, DATA))), Ok(Dispatched::Stopped));
    assert_eq!(waves.load(Ordering::Relaxed), 4);
    drop(gpu);
    // A thread of the pool may hold the kernel for a moment still.
    while waves.load(Ordering::Relaxed) != 0 {
        std::thread::yield_now();
    }
}

// Two queues of a process: one kernel waits for what the other one writes.
#[test]
fn kernels_of_two_queues_run_side_by_side() {
    let gpu = Gpu::new(0);
    gpu.kernel(RSRC2, KERNARG, &WAITS);
    let other = Compute::new(gpu.compute.machine.clone(), gpu.compute.pool.clone());
    gpu.put(CODE + 0x1010, &[256, 0]);
    gpu.put(CODE + 0x1030, &[7, RSRC2, KERNARG]);
    // v_mov_b32_e32 v1, 0; v_mov_b32_e32 v2, 1; global_store_dword v1, v2, s[0:1]
    gpu.put(CODE + 0x1100, &[0x7e02_0280, 0x7e04_0281, 0xdc70_8000, 0x0000_0201, ENDPGM]);
    let mut dispatch = packet(1, 1, DATA + 4);
    dispatch.packet[8] = CODE as u32 + 0x1000;
    let done = AtomicU32::new(0);
    let write = || {
        while gpu.word(DATA) == 0 {
            std::thread::yield_now();
        }
        let context = Context { dispatcher: &other, ..gpu.context() };
        assert_eq!(other.dispatch(&Dispatch::Aql(&dispatch), &context), Ok(Dispatched::Done));
        done.store(1, Ordering::Relaxed);
    };
    let since = Instant::now();
    assert_eq!(beside(write, || gpu.run(&packet(1, 1, DATA))), Ok(Dispatched::Done));
    assert_eq!(done.load(Ordering::Relaxed), 1, "after {:?}", since.elapsed());
}
