//! What the packet processor reads of a kernel: its descriptor, or the registers of a PM4 queue.
//!
//! A kernel descriptor (`llvm::amdhsa::kernel_descriptor_t`) and the older `amd_kernel_code_t` have the fields that count
//! at the same offsets.

use super::launch::{Launch, MAX_GROUP_SEGMENT, Scratch};
use crate::engine::dispatch::{AqlDispatch, RegisterDispatch};
use crate::engine::memory::{Memory, at};
use crate::engine::{DispatchFailure, Failure};

/// Offset of `kernel_code_entry_byte_offset`, 64 bits signed.
const ENTRY: u64 = 16;
/// Offset of `compute_pgm_rsrc1`; `compute_pgm_rsrc2` and `kernel_code_properties` follow.
const RSRC1: u64 = 48;

/// `kernel_code_properties`: which user SGPRs there are, in this order.
mod property {
    pub const PRIVATE_SEGMENT_BUFFER: u32 = 1;
    pub const DISPATCH_PTR: u32 = 1 << 1;
    pub const QUEUE_PTR: u32 = 1 << 2;
    pub const KERNARG_SEGMENT_PTR: u32 = 1 << 3;
    pub const DISPATCH_ID: u32 = 1 << 4;
    pub const FLAT_SCRATCH_INIT: u32 = 1 << 5;
    pub const PRIVATE_SEGMENT_SIZE: u32 = 1 << 6;
    /// Of `amd_kernel_code_t` only: numbers of workgroups; y and z follow.
    pub const GRID_WORKGROUP_COUNT_X: u32 = 1 << 7;
}

/// Offsets in `amd_queue_t`.
mod queue {
    pub const COMPUTE_TMPRING_SIZE: u64 = 140;
    pub const SCRATCH_RESOURCE_DESCRIPTOR: u64 = 144;
    pub const SCRATCH_BACKING_MEMORY_LOCATION: u64 = 160;
}

/// Offsets among the shader registers of a PM4 queue (`gc_9_0_offset.h`, from `COMPUTE_DISPATCH_INITIATOR`).
mod register {
    pub const START_X: usize = 0x204;
    pub const NUM_THREAD_X: usize = 0x207;
    pub const PGM_RSRC1: usize = 0x212;
    pub const PGM_RSRC2: usize = 0x213;
    pub const TMPRING_SIZE: usize = 0x218;
    pub const USER_DATA_0: usize = 0x240;
}

/// `COMPUTE_DISPATCH_INITIATOR`: the last workgroup of a dimension may be smaller (`NUM_THREAD_PARTIAL`).
const PARTIAL_TG_EN: u32 = 1 << 1;
/// `COMPUTE_DISPATCH_INITIATOR`: the dimensions count work-items.
const USE_THREAD_DIMENSIONS: u32 = 1 << 5;
/// `COMPUTE_DISPATCH_INITIATOR`: workgroups are counted from 0, whatever `COMPUTE_START_*` says.
const FORCE_START_AT_000: u32 = 1 << 2;

/// Most work-items of a workgroup.
const MAX_WORKGROUP: u64 = 1024;

/// User SGPRs that there are.
pub const USER_SGPRS: usize = 16;

/// Either a launch, or more scratch memory has to be asked for first.
pub enum Prepared {
    /// It can run.
    Ready(Launch),
    /// The scratch memory of the queue is too small for one workgroup.
    InsufficientScratch,
}

struct UserRegisters {
    values: [u32; USER_SGPRS],
    used: usize,
}

impl UserRegisters {
    fn push(&mut self, value: u32) {
        // Those beyond what rsrc2 says are never loaded; a descriptor that asks for more than there are is checked after.
        if let Some(slot) = self.values.get_mut(self.used) {
            *slot = value;
        }
        self.used += 1;
    }

    fn push_pair(&mut self, value: u64) {
        self.push(value as u32);
        self.push((value >> 32) as u32);
    }
}

/// Checks of a workgroup's size; how many work-items it has.
fn workgroup_items(workgroup: [u32; 3]) -> Result<u32, DispatchFailure> {
    if workgroup.contains(&0) {
        return Err(DispatchFailure::Dimensions);
    }
    let items = workgroup.iter().fold(1u64, |product, size| product.saturating_mul(u64::from(*size)));
    if items > MAX_WORKGROUP {
        return Err(DispatchFailure::WorkgroupSize);
    }
    Ok(items as u32)
}

/// What an AQL packet asks for.
///
/// # Errors
/// What the packet processor would stop its queue with.
pub fn from_packet(dispatch: &AqlDispatch, memory: &dyn Memory) -> Result<Prepared, Failure> {
    let [header, wg_xy, wg_z, grid_x, grid_y, grid_z, private, group, _, _, kernarg_low, kernarg_high, ..] =
        dispatch.packet;
    let dimensions = header >> 16 & 3;
    if dimensions == 0 {
        return Err(DispatchFailure::Dimensions.into());
    }
    // What the setup does not count is 1, whatever stands there.
    let only = |index: u32, value: u32| if index < dimensions { value } else { 1 };
    let workgroup = [only(0, wg_xy & 0xffff), only(1, wg_xy >> 16), only(2, wg_z & 0xffff)];
    let grid = [only(0, grid_x), only(1, grid_y), only(2, grid_z)];
    if grid.contains(&0) {
        return Err(DispatchFailure::Dimensions.into());
    }
    let items = workgroup_items(workgroup)?;
    if group > MAX_GROUP_SEGMENT {
        return Err(DispatchFailure::GroupSegment.into());
    }
    let object = dispatch.kernel_object();
    if object == 0 {
        return Err(DispatchFailure::Code { kernel_object: object }.into());
    }
    let mut words = [0u32; 3];
    memory.read_words(at(object, RSRC1)?, &mut words)?;
    let [rsrc1, rsrc2, properties] = words;
    let entry = object.wrapping_add(memory.load64(at(object, ENTRY)?)?);
    if !entry.is_multiple_of(4) {
        return Err(DispatchFailure::Code { kernel_object: object }.into());
    }
    let (scratch, descriptor, location) = match dispatch.amd_queue {
        Some(amd_queue) => {
            let mut descriptor = [0u32; 4];
            let tmpring = memory.load32(at(amd_queue, queue::COMPUTE_TMPRING_SIZE)?)?;
            memory.read_words(at(amd_queue, queue::SCRATCH_RESOURCE_DESCRIPTOR)?, &mut descriptor)?;
            let location = memory.load64(at(amd_queue, queue::SCRATCH_BACKING_MEMORY_LOCATION)?)?;
            (Scratch::from_tmpring(tmpring), descriptor, location)
        }
        None => (Scratch::default(), [0; 4], 0),
    };
    // Without private memory no wave needs a place, however many the queue has.
    let scratch = if private == 0 { Scratch::default() } else { scratch };
    if private != 0 && !scratch.is_enough(private, items) {
        return Ok(Prepared::InsufficientScratch);
    }
    let mut user = UserRegisters { values: [0; USER_SGPRS], used: 0 };
    if properties & property::PRIVATE_SEGMENT_BUFFER != 0 {
        descriptor.iter().for_each(|word| user.push(*word));
    }
    if properties & property::DISPATCH_PTR != 0 {
        user.push_pair(dispatch.packet_address);
    }
    if properties & property::QUEUE_PTR != 0 {
        user.push_pair(dispatch.amd_queue.unwrap_or(0));
    }
    if properties & property::KERNARG_SEGMENT_PTR != 0 {
        user.push(kernarg_low);
        user.push(kernarg_high);
    }
    if properties & property::DISPATCH_ID != 0 {
        user.push_pair(dispatch.index);
    }
    if properties & property::FLAT_SCRATCH_INIT != 0 {
        user.push_pair(location);
    }
    if properties & property::PRIVATE_SEGMENT_SIZE != 0 {
        user.push(private);
    }
    for dimension in 0..3 {
        if properties & property::GRID_WORKGROUP_COUNT_X << dimension != 0 {
            let mut counts = grid.iter().zip(workgroup).map(|(grid, workgroup)| grid.div_ceil(workgroup));
            user.push(counts.nth(dimension).unwrap_or(0));
        }
    }
    let launch = Launch {
        entry,
        rsrc1,
        rsrc2,
        user: user.values,
        workgroup,
        items,
        start: [0; 3],
        grid: grid.map(u64::from),
        group_segment: group,
        scratch,
    };
    launch.check()?;
    Ok(Prepared::Ready(launch))
}

/// What DISPATCH_DIRECT asks for.
///
/// # Errors
/// What the packet processor would stop its queue with.
pub fn from_registers(dispatch: &RegisterDispatch<'_>) -> Result<Prepared, Failure> {
    let register = |index: usize| dispatch.registers.get(index).copied().unwrap_or(0);
    let three = |first: usize| [register(first), register(first + 1), register(first + 2)];
    let threads = three(register::NUM_THREAD_X);
    let workgroup = threads.map(|threads| (threads & 0xffff).max(1));
    let items = workgroup_items(workgroup)?;
    let start = if dispatch.initiator & FORCE_START_AT_000 != 0 { [0; 3] } else { three(register::START_X) };
    let mut grid = [0u64; 3];
    let by_items = dispatch.initiator & USE_THREAD_DIMENSIONS != 0;
    for (index, size) in grid.iter_mut().enumerate() {
        let of = |list: [u32; 3]| u64::from(list.get(index).copied().unwrap_or(0));
        let threads = of(threads);
        let partial = if dispatch.initiator & PARTIAL_TG_EN != 0 { threads >> 16 } else { 0 };
        let full = of(workgroup);
        *size = match of(dispatch.dimensions) {
            0 => 0,
            count if by_items => count,
            count if partial != 0 && partial < full => {
                (count - 1).saturating_mul(full).saturating_add(partial)
            }
            count => count.saturating_mul(full),
        };
    }
    let mut user = [0; USER_SGPRS];
    for (index, value) in user.iter_mut().enumerate() {
        *value = register(register::USER_DATA_0 + index);
    }
    let rsrc2 = register(register::PGM_RSRC2);
    let scratch = match rsrc2 & 1 {
        1 => Scratch::from_tmpring(register(register::TMPRING_SIZE)),
        _ => Scratch::default(),
    };
    let launch = Launch {
        entry: dispatch.program(),
        rsrc1: register(register::PGM_RSRC1),
        rsrc2,
        user,
        workgroup,
        items,
        start,
        grid,
        // LDS_SIZE, in units of 128 words.
        group_segment: (rsrc2 >> 15 & 0x1ff) * 512,
        scratch,
    };
    if launch.group_segment > MAX_GROUP_SEGMENT {
        return Err(DispatchFailure::GroupSegment.into());
    }
    launch.check()?;
    // Where it says nothing of scratch memory, the kernel is taken at its word that it needs none.
    if launch.scratch.waves != 0 && launch.scratch.waves < launch.waves() {
        return Ok(Prepared::InsufficientScratch);
    }
    Ok(Prepared::Ready(launch))
}
