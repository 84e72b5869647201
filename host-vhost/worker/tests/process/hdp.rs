//! The page of HDP flush registers.

use std::fs::{File, read_to_string};
use std::os::unix::fs::FileExt;

use kfd_ipc::worker::Settings;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::memory::{GTT, MMIO_REMAP, WRITABLE};
use crate::support::*;

/// `enum kfd_mmio_remap` (linux/kfd_ioctl.h).
const HDP_MEM_FLUSH_CNTL: u32 = 0;
const HDP_REG_FLUSH_CNTL: u32 = 4;

const VA: u64 = 0x7f00_0000_0000;
const EINVAL: u32 = 22;

fn worker(settings: Settings) -> (Worker, GpuId) {
    on_gpu("gfx906", settings)
}

fn registers(gpu_id: GpuId, page: u64) -> AllocMemoryRequest {
    let flags = MMIO_REMAP | WRITABLE;
    AllocMemoryRequest { va: GuestVa(VA + page * 4096), size: 4096, gpu_id, flags, ..Default::default() }
}

fn flush(handle: Handle, register: u32) -> FlushHdpRequest {
    FlushHdpRequest { handle, register, pad: 0 }
}

/// The pages of the model's memory that the worker has mapped: where, for the debugger, and in the model's file.
fn pages_of_the_model(worker: &Worker) -> Vec<(u64, u64)> {
    let maps = read_to_string(format!("/proc/{}/maps", worker.pid())).unwrap();
    let page = |line: &str| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
        (end - start == 4096 && line.contains("rw-s") && line.contains("memfd:")).then_some((start, offset))
    };
    maps.lines().filter_map(page).collect()
}

/// What the model has in its two registers, seen from outside.
fn seen(worker: &Worker, address: u64) -> (u32, u32) {
    let mut bytes = [0; 8];
    let memory = File::open(format!("/proc/{}/mem", worker.pid())).unwrap();
    memory.read_exact_at(&mut bytes, address).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    (word(0), word(4))
}

#[test]
fn a_flush_is_a_store_to_the_models_register() {
    let (mut worker, gpu_id) = worker(settings());
    let before = pages_of_the_model(&worker);
    let (made, _) = worker.call::<AllocMemory>(&registers(gpu_id, 0), &[]).unwrap();
    assert_eq!(made.mappable, 0);
    let handle = made.handle;
    let buffer = BufferRequest { handle };
    let (mapped, _) = worker.call::<MapMemory>(&buffer, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0), "GPUs have it too, as AMD's library maps it");
    let mut pages = pages_of_the_model(&worker);
    pages.retain(|page| !before.contains(page));
    let [(address, _)] = pages[..] else { panic!("{pages:x?}") };
    assert_eq!(seen(&worker, address), (0, 0));
    worker.call::<FlushHdp>(&flush(handle, HDP_MEM_FLUSH_CNTL), &[]).unwrap();
    assert_eq!(seen(&worker, address), (1, 0));
    worker.call::<FlushHdp>(&flush(handle, HDP_REG_FLUSH_CNTL), &[]).unwrap();
    assert_eq!(seen(&worker, address), (1, 1));

    worker.call::<UnmapMemory>(&buffer, &[gpu_id]).unwrap();
    worker.call::<FreeMemory>(&buffer, &[]).unwrap();
    assert_eq!(pages_of_the_model(&worker), before);
    assert_eq!(worker.failure::<FlushHdp>(&flush(handle, 0), &[]), (Status::BAD_HANDLE, 0));
    worker.call::<AllocMemory>(&registers(gpu_id, 0), &[]).unwrap();
}

#[test]
fn only_the_registers_of_such_a_page_are_stored_to() {
    let (mut worker, gpu_id) = worker(settings());
    let (made, _) = worker.call::<AllocMemory>(&registers(gpu_id, 0), &[]).unwrap();
    for register in [1, 2, 8, 4092, 4096, u32::MAX] {
        let request = flush(made.handle, register);
        assert_eq!(worker.failure::<FlushHdp>(&request, &[]), (Status::INVALID, 0), "{register}");
    }
    let padded = FlushHdpRequest { pad: 1, ..flush(made.handle, 0) };
    assert_eq!(worker.failure::<FlushHdp>(&padded, &[]), (Status::INVALID, 0));
    let memory = AllocMemoryRequest { flags: GTT | WRITABLE, ..registers(gpu_id, 8) };
    let (memory, _) = worker.call::<AllocMemory>(&memory, &[]).unwrap();
    assert_eq!(worker.failure::<FlushHdp>(&flush(memory.handle, 0), &[]), (Status::INVALID, 0));
    let nothing = flush(Handle::new(4000, 7), 0);
    assert_eq!(worker.failure::<FlushHdp>(&nothing, &[]), (Status::BAD_HANDLE, 0));
}

#[test]
fn a_context_has_one_page_of_each_gpu() {
    let (mut worker, gpu_id) = worker(Settings { max_runs: 1, ..settings() });
    let two = AllocMemoryRequest { size: 8192, ..registers(gpu_id, 0) };
    // kfd_ioctl_alloc_memory_of_gpu wants a page.
    assert_eq!(worker.failure::<AllocMemory>(&two, &[]), (Status::ERRNO, EINVAL));
    let (first, _) = worker.call::<AllocMemory>(&registers(gpu_id, 0), &[]).unwrap();
    assert_eq!(worker.failure::<AllocMemory>(&registers(gpu_id, 1), &[]), (Status::INVALID, 0));
    let share = ShareMemoryRequest { handle: first.handle, offset: 0, size: 4096 };
    assert_eq!(worker.failure::<ShareMemory>(&share, &[]), (Status::NOT_SUPPORTED, 0));
    worker.call::<FreeMemory>(&BufferRequest { handle: first.handle }, &[]).unwrap();
    worker.call::<AllocMemory>(&registers(gpu_id, 1), &[]).unwrap();

    let (mut none, gpu_id) = self::worker(Settings { max_runs: 0, ..settings() });
    assert_eq!(none.failure::<AllocMemory>(&registers(gpu_id, 0), &[]), (Status::LIMIT, 0));
}
