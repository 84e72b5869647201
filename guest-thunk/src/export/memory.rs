//! Memory.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use std::os::fd::IntoRawFd;

use hsakmt_abi::memory::{
    HsaMemFlags, HsaMemMapFlags, HsaMemoryRange, HsaPointerInfo, HsaSharedMemoryHandle,
};
use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::limits::MAX_GPUS;

use super::exports;
use super::pointer::{Address, In, Out, number};
use crate::thunk::adopt::{self, Kind};
use crate::thunk::cross::{self, Direction, Range};
use crate::thunk::memory::Request;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::{open, process};

/// In AMD's order: what stands at `memory_address` when a call fails depends on how far it came.
fn allocate(request: Request, memory_address: Out<u64>) -> Outcome<()> {
    let thunk = open::current()?;
    thunk.memory.check_version(&thunk.client, request.flags)?;
    let snapshot = thunk.snapshot()?;
    snapshot.node(request.node)?;
    request.check_size()?;
    let place = memory_address.required("MemoryAddress")?;
    let fixed = request.flags.is_set(HsaMemFlags::FIXED_ADDRESS);
    if !fixed {
        place.write(0);
    }
    let address = if fixed { place.read().unwrap_or(0) } else { 0 };
    let request = Request { address, ..request };
    request.check_flags()?;
    let allocated = thunk.memory.allocate(thunk.host(&snapshot), request);
    place.write(*allocated.as_ref().unwrap_or(&0));
    allocated.map(|_| ())
}

/// The nodes of a list; the system has a bounded number of them, but a list may have a node twice.
pub(super) fn nodes(number_of_nodes: u64, node_array: In<u32>) -> Outcome<Vec<u32>> {
    let most = MAX_GPUS.saturating_mul(2);
    let count = usize::try_from(number_of_nodes).ok().filter(|count| (1..=most).contains(count));
    let count = count.filter(|_| !node_array.is_null());
    let wrong =
        || Refusal::parameter(format!("NumberOfNodes is {number_of_nodes}, expected 1 to {most} and a list"));
    Ok(node_array.read_all(count.ok_or_else(wrong)?))
}

/// Memory that belongs to the application.
fn register(address: Address, size: u64, nodes: &[u32], kind: Kind) -> Outcome<()> {
    let thunk = open::current()?;
    let gpus = if nodes.is_empty() { Vec::new() } else { thunk.snapshot()?.gpu_ids(nodes)? };
    adopt::register(&thunk, number(address), size, &gpus, kind)
}

fn take_shared(
    handle: In<HsaSharedMemoryHandle>,
    memory_address: Out<u64>,
    size_in_bytes: Out<u64>,
    number_of_nodes: u64,
    node_array: In<u32>,
) -> Outcome<()> {
    let thunk = open::current()?;
    let missing = || Refusal::parameter("SharedMemoryHandle is NULL");
    let handle = handle.read().ok_or_else(missing)?;
    let (address, size) = (memory_address.required("MemoryAddress")?, size_in_bytes.required("SizeInBytes")?);
    let snapshot = thunk.snapshot()?;
    let gpus = match node_array.is_null() {
        true if number_of_nodes > 0 => return Err(Refusal::parameter("NodeArray is NULL")),
        true => Vec::new(),
        false => snapshot.gpu_ids(&nodes(number_of_nodes, node_array)?)?,
    };
    let imported = thunk.memory.import_shared(thunk.host(&snapshot), handle, &gpus)?;
    address.write(imported.0);
    size.write(imported.1);
    Ok(())
}

/// Ranges in one list; `IOV_MAX` of the kernel.
const MOST_RANGES: u64 = 1024;

/// Copies between this process's ranges, the first list, and another's.
fn copy_across(
    pid: u32,
    lists: [(In<HsaMemoryRange>, u64); 2],
    size_copied: Out<u64>,
    direction: Direction,
) -> Outcome<()> {
    open::current()?;
    let [local, remote] = lists.map(|(list, count)| -> Outcome<Vec<Range>> {
        let count = usize::try_from(count).ok().filter(|_| (1..=MOST_RANGES).contains(&count));
        let count = count.filter(|_| !list.is_null());
        let wrong = || Refusal::parameter(format!("a list of ranges: expected 1 to {MOST_RANGES} of them"));
        let range =
            |range: HsaMemoryRange| Range { address: range.memory_address, size: range.size_in_bytes };
        Ok(list.read_all(count.ok_or_else(wrong)?).into_iter().map(range).collect())
    });
    let (copied, result) = cross::copy(pid, &local?, &remote?, direction);
    size_copied.write(copied);
    result
}

exports! {
    "memory";
    /// Allocates memory that GPUs can access.
    done("system memory is the guest's; VRAM with HostAccess needs a window on the host; no NUMA binding")
    fn hsaKmtAllocMemory(
        preferred_node: u32,
        size_in_bytes: u64,
        mem_flags: HsaMemFlags,
        memory_address: Out<u64>,
    ) {
        let request =
            Request { node: preferred_node, size: size_in_bytes, alignment: 0, flags: mem_flags, address: 0 };
        allocate(request, memory_address)
    }

    /// Allocates aligned memory that GPUs can access.
    done("as hsaKmtAllocMemory")
    fn hsaKmtAllocMemoryAlign(
        preferred_node: u32,
        size_in_bytes: u64,
        alignment: u64,
        mem_flags: HsaMemFlags,
        memory_address: Out<u64>,
    ) {
        let request =
            Request { node: preferred_node, size: size_in_bytes, alignment, flags: mem_flags, address: 0 };
        allocate(request, memory_address)
    }

    /// Frees memory.
    done
    fn hsaKmtFreeMemory(memory_address: Address, size_in_bytes: u64) {
        let _ = size_in_bytes;
        let thunk = open::current()?;
        if memory_address.is_null() {
            return Err(Refusal::error("MemoryAddress is NULL"));
        }
        thunk.memory.free(&thunk.client, number(memory_address))
    }

    /// How much VRAM is left.
    done("bounded by what the VM was given")
    fn hsaKmtAvailableMemory(node: u32, available_bytes: Out<u64>) {
        let thunk = open::current()?;
        let available_bytes = available_bytes.required("AvailableBytes")?;
        let snapshot = thunk.snapshot()?;
        let Some(gpu) = snapshot.gpu_of(node)? else {
            return Err(Refusal::error(format!("node {node} has no GPU")));
        };
        available_bytes.write(process::available_memory(&thunk, gpu.gpu_id)?);
        Ok(())
    }

    /// Registers memory of the application.
    done("refused with NOT_SUPPORTED, so that runtimes copy in stages, unless VIRTIO_KFD_REGISTER=adopt is set")
    fn hsaKmtRegisterMemory(memory_address: Address, memory_size_in_bytes: u64) {
        register(memory_address, memory_size_in_bytes, &[], Kind::Coarse)
    }

    /// Registers memory of the application for some GPUs.
    done("as hsaKmtRegisterMemory")
    fn hsaKmtRegisterMemoryToNodes(
        memory_address: Address,
        memory_size_in_bytes: u64,
        number_of_nodes: u64,
        node_array: In<u32>,
    ) {
        open::current()?;
        // hsakmt_virtio.h declares it with 32 bits, of which a caller leaves the others as they are.
        let nodes = nodes(number_of_nodes & u64::from(u32::MAX), node_array)?;
        register(memory_address, memory_size_in_bytes, &nodes, Kind::Coarse)
    }

    /// Registers memory of the application with flags.
    done("as hsaKmtRegisterMemory")
    fn hsaKmtRegisterMemoryWithFlags(
        memory_address: Address,
        memory_size_in_bytes: u64,
        mem_flags: HsaMemFlags,
    ) {
        open::current()?;
        let (coarse, extended) = (HsaMemFlags::COARSE_GRAIN, HsaMemFlags::EXTENDED_COHERENT);
        let kind = match (mem_flags.is_set(coarse), mem_flags.is_set(extended)) {
            (true, true) => {
                return Err(Refusal::parameter("MemFlags has both ExtendedCoherent and CoarseGrain"));
            }
            (true, false) => Kind::Coarse,
            (false, true) => Kind::Extended,
            (false, false) => Kind::Fine,
        };
        let paged = mem_flags.is_set(HsaMemFlags::HOST_ACCESS) && !mem_flags.is_set(HsaMemFlags::NON_PAGED);
        if !paged {
            let why = "MemFlags are not those of paged host memory (HostAccess, not NonPaged)";
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
        }
        register(memory_address, memory_size_in_bytes, &[], kind)
    }

    /// Ends a registration.
    done
    fn hsaKmtDeregisterMemory(memory_address: Address) {
        let thunk = open::current()?;
        thunk.memory.deregister(&thunk.client, number(memory_address))
    }

    /// Maps memory to all GPUs that can reach it.
    done
    fn hsaKmtMapMemoryToGPU(memory_address: Address, memory_size_in_bytes: u64, alternate_va_gpu: Out<u64>) {
        let thunk = open::current()?;
        if memory_address.is_null() {
            return Err(Refusal::error("MemoryAddress is NULL"));
        }
        alternate_va_gpu.write(0);
        let snapshot = thunk.snapshot()?;
        let mapped = thunk.memory.map(thunk.host(&snapshot), number(memory_address), memory_size_in_bytes);
        alternate_va_gpu.write(mapped?);
        Ok(())
    }

    /// Maps memory to the GPUs of some nodes, and to no others.
    done
    fn hsaKmtMapMemoryToGPUNodes(
        memory_address: Address,
        memory_size_in_bytes: u64,
        alternate_va_gpu: Out<u64>,
        mem_map_flags: HsaMemMapFlags,
        number_of_nodes: u64,
        node_array: In<u32>,
    ) {
        let _ = mem_map_flags;
        let thunk = open::current()?;
        if memory_address.is_null() {
            return Err(Refusal::error("MemoryAddress is NULL"));
        }
        let nodes = nodes(number_of_nodes, node_array)?;
        let snapshot = thunk.snapshot()?;
        let (address, size) = (number(memory_address), memory_size_in_bytes);
        match thunk.memory.map_to_nodes(thunk.host(&snapshot), address, size, &nodes)? {
            // AMD's library leaves the caller's value where there is no other address.
            0 => {}
            other => alternate_va_gpu.write(other),
        }
        Ok(())
    }

    /// Unmaps memory from all GPUs.
    done
    fn hsaKmtUnmapMemoryToGPU(memory_address: Address) {
        let thunk = open::current()?;
        // A runtime is known to do that.
        if memory_address.is_null() {
            return Ok(());
        }
        thunk.memory.unmap(&thunk.client, number(memory_address))
    }

    /// What is known of an address.
    done
    fn hsaKmtQueryPointerInfo(pointer: Address, pointer_info: Out<HsaPointerInfo>) {
        let thunk = open::current()?;
        let pointer_info = pointer_info.required("PointerInfo")?;
        let snapshot = thunk.current_snapshot().unwrap_or_default();
        let found = thunk.memory.pointer_info(&snapshot, number(pointer));
        // An unknown address leaves zeros: HSA_POINTER_UNKNOWN.
        pointer_info.write(*found.as_ref().unwrap_or(&HsaPointerInfo::default()));
        found.map(|_| ())
    }

    /// Puts a word of the application's to an allocation.
    done
    fn hsaKmtSetMemoryUserData(pointer: Address, user_data: Address) {
        let thunk = open::current()?;
        thunk.memory.set_user_data(number(pointer), number(user_data))
    }

    /// Sets cache policies of Kaveri; all other chips have them set by the library.
    not_implemented("as AMD's library answers for all chips but Kaveri")
    fn hsaKmtSetMemoryPolicy(
        node: u32,
        default_policy: u32,
        alternate_policy: u32,
        memory_address_alternate: Address,
        memory_size_in_bytes: u64,
    ) {
        let _ = (default_policy, alternate_policy, memory_address_alternate, memory_size_in_bytes);
        open::current()?.snapshot()?.node(node)?;
        Ok(())
    }

    /// Shares memory with another process.
    done("within one guest; memory of a GPU only (system memory goes as a dma-buf)")
    fn hsaKmtShareMemory(
        memory_address: Address,
        size_in_bytes: u64,
        shared_memory_handle: Out<HsaSharedMemoryHandle>,
    ) {
        let thunk = open::current()?;
        let handle = shared_memory_handle.required("SharedMemoryHandle")?;
        let snapshot = thunk.snapshot()?;
        handle.write(thunk.memory.share(thunk.host(&snapshot), number(memory_address), size_in_bytes)?);
        Ok(())
    }

    /// Takes memory that another process shares.
    done("as hsaKmtShareMemory")
    fn hsaKmtRegisterSharedHandle(
        shared_memory_handle: In<HsaSharedMemoryHandle>,
        memory_address: Out<u64>,
        size_in_bytes: Out<u64>,
    ) {
        take_shared(shared_memory_handle, memory_address, size_in_bytes, 0, In::from(std::ptr::null()))
    }

    /// Takes memory that another process shares, for some GPUs.
    done("as hsaKmtShareMemory")
    fn hsaKmtRegisterSharedHandleToNodes(
        shared_memory_handle: In<HsaSharedMemoryHandle>,
        memory_address: Out<u64>,
        size_in_bytes: Out<u64>,
        number_of_nodes: u64,
        node_array: In<u32>,
    ) {
        take_shared(shared_memory_handle, memory_address, size_in_bytes, number_of_nodes, node_array)
    }

    /// A dma-buf of an allocation.
    done("of the guest's virtio-gpu device; in loop-back it cannot be mapped, and only processes of the same `kfd-loopback-vm` can import it")
    fn hsaKmtExportDMABufHandle(
        memory_address: Address,
        memory_size_in_bytes: u64,
        dma_buf_fd: Out<i32>,
        offset: Out<u64>,
    ) {
        let thunk = open::current()?;
        process::require_dma_bufs(&thunk.client)?;
        let (fd, at) = (dma_buf_fd.required("DMABufFd")?, offset.required("Offset")?);
        let exported = thunk.memory.export(&thunk.client, number(memory_address), memory_size_in_bytes)?;
        at.write(exported.1);
        fd.write(exported.0.into_raw_fd());
        Ok(())
    }

    /// Reads memory of another process.
    done("by the guest's kernel and its rules: ordinary memory, not what lies in blobs; AMD's 6.2.4 is NOT_IMPLEMENTED")
    fn hsaKmtProcessVMRead(
        pid: u32,
        local_memory_array: In<HsaMemoryRange>,
        local_memory_array_count: u64,
        remote_memory_array: In<HsaMemoryRange>,
        remote_memory_array_count: u64,
        size_copied: Out<u64>,
    ) {
        let lists = [
            (local_memory_array, local_memory_array_count),
            (remote_memory_array, remote_memory_array_count),
        ];
        copy_across(pid, lists, size_copied, Direction::Read)
    }

    /// Writes memory of another process.
    done("by the guest's kernel and its rules: ordinary memory, not what lies in blobs; AMD's 6.2.4 is NOT_IMPLEMENTED")
    fn hsaKmtProcessVMWrite(
        pid: u32,
        local_memory_array: In<HsaMemoryRange>,
        local_memory_array_count: u64,
        remote_memory_array: In<HsaMemoryRange>,
        remote_memory_array_count: u64,
        size_copied: Out<u64>,
    ) {
        let lists = [
            (local_memory_array, local_memory_array_count),
            (remote_memory_array, remote_memory_array_count),
        ];
        copy_across(pid, lists, size_copied, Direction::Write)
    }

    /// Reads or writes a file from or to memory of a GPU.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtAisReadWriteFile(
        memory_address: Address,
        memory_size_in_bytes: u64,
        fd: i32,
        file_offset: i64,
        ais_flags: u32,
        size_copied_in_bytes: Out<u64>,
        status: Out<i32>,
    );

    /// Puts system memory in place of an allocation's first page.
    not_supported("as AMD's library answers unless it is built for the address sanitizer")
    fn hsaKmtReplaceAsanHeaderPage(addr: Address);

    /// Puts an allocation's first page back.
    not_supported("as AMD's library answers unless it is built for the address sanitizer")
    fn hsaKmtReturnAsanHeaderPage(addr: Address);
}
