//! The render node's questions.

use kfd_abi::drm::amdgpu::*;
use virtio_kfd_protocol::calls::{RenderInfo, RenderVersion};
use virtio_kfd_protocol::limits::MAX_RENDER_INFO_BYTES;
use virtio_kfd_protocol::{GpuRequest, RenderInfoAnswer, RenderInfoRequest, RenderVersionAnswer, Status};
use zerocopy::{FromBytes, IntoBytes};

use super::{Outcome, Reply};
use crate::context::Context;
use crate::failure::{Failure, expect_zero};

/// The only register that may be read: `mmGB_ADDR_CONFIG` as a dword offset, which libdrm asks for on every GPU since
/// GFX9.
const GB_ADDR_CONFIG: u32 = 0x263e;

/// Which of the four words of the query's union mean something.
enum Arguments {
    /// None.
    None,
    /// The first three are small numbers: a type, an instance, an index.
    Words,
    /// A read of registers.
    Registers,
}

/// The queries that are allowed: what the device is and how much memory it has. Not among them: the video BIOS, sensors and
/// codecs, registers in general, and faults, which are those of all processes of the host.
fn arguments_of(query: u32) -> Option<Arguments> {
    match query {
        AMDGPU_INFO_ACCEL_WORKING
        | AMDGPU_INFO_TIMESTAMP
        | AMDGPU_INFO_VRAM_USAGE
        | AMDGPU_INFO_VIS_VRAM_USAGE
        | AMDGPU_INFO_GTT_USAGE
        | AMDGPU_INFO_VRAM_GTT
        | AMDGPU_INFO_MEMORY
        | AMDGPU_INFO_DEV_INFO
        | AMDGPU_INFO_VRAM_LOST_COUNTER
        | AMDGPU_INFO_RAS_ENABLED_FEATURES => Some(Arguments::None),
        AMDGPU_INFO_HW_IP_INFO | AMDGPU_INFO_HW_IP_COUNT | AMDGPU_INFO_FW_VERSION => Some(Arguments::Words),
        AMDGPU_INFO_READ_MMR_REG => Some(Arguments::Registers),
        _ => None,
    }
}

/// Checks a query and its arguments.
fn check(request: &RenderInfoRequest) -> Result<(), Failure> {
    let query = request.query;
    let kind = arguments_of(query).ok_or_else(|| {
        Failure::new(Status::NOT_SUPPORTED, format!("RenderInfo: query {query:#x} is not allowed"))
    })?;
    let wrong = || Failure::invalid(format!("RenderInfo: query {query:#x} with {:?}", request.arguments));
    let right = match (kind, request.arguments) {
        (Arguments::None, words) => words == [0; 4],
        (Arguments::Words, [kind, instance, index, rest]) => {
            kind <= 0xff && instance <= 0xff && index <= 0xff && rest == 0
        }
        (Arguments::Registers, [offset, count, _, flags]) => {
            offset == GB_ADDR_CONFIG && count == 1 && flags == 0
        }
    };
    if right { Ok(()) } else { Err(wrong()) }
}

pub fn render_version(context: &Context, request: &GpuRequest) -> Outcome<RenderVersion> {
    expect_zero("RenderVersion", &[request.pad.into()])?;
    let version = context.gpu(request.gpu_id)?.render.version()?;
    Ok(Reply::of(RenderVersionAnswer {
        major: version.major.cast_unsigned(),
        minor: version.minor.cast_unsigned(),
        patch: version.patch.cast_unsigned(),
        pad: 0,
    }))
}

pub fn render_info(context: &Context, request: &RenderInfoRequest) -> Outcome<RenderInfo> {
    expect_zero("RenderInfo", &[request.pad.into()])?;
    let gpu = context.gpu(request.gpu_id)?;
    check(request)?;
    let size = request.return_size as usize;
    if size == 0 || size > MAX_RENDER_INFO_BYTES {
        let reason = format!("RenderInfo: return_size {size}, expected 1 to {MAX_RENDER_INFO_BYTES}");
        return Err(Failure::invalid(reason));
    }
    let mut bytes = vec![0; size];
    gpu.render.info(request.query, request.arguments, &mut bytes)?;
    if let Some(limit) = context.vram_limit {
        limit_vram(request.query, &mut bytes, limit);
    }
    Ok(Reply::with(RenderInfoAnswer { size: request.return_size, pad: 0 }, bytes))
}

/// Shows VRAM as no larger than what this context may use.
fn limit_vram(query: u32, bytes: &mut [u8], limit: u64) {
    match query {
        AMDGPU_INFO_MEMORY => {
            if let Ok((mut info, _)) = MemoryInfo::read_from_prefix(bytes) {
                for heap in [&mut info.vram, &mut info.cpu_accessible_vram] {
                    heap.total_heap_size = heap.total_heap_size.min(limit);
                    heap.usable_heap_size = heap.usable_heap_size.min(limit);
                    heap.max_allocation = heap.max_allocation.min(limit);
                }
                // The bytes have the length of the structure: they were just read as one.
                let _ = info.write_to_prefix(bytes);
            }
        }
        AMDGPU_INFO_VRAM_GTT => {
            if let Ok((mut info, _)) = InfoVramGtt::read_from_prefix(bytes) {
                info.vram_size = info.vram_size.min(limit);
                info.vram_cpu_accessible_size = info.vram_cpu_accessible_size.min(limit);
                // As above.
                let _ = info.write_to_prefix(bytes);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(query: u32, arguments: [u32; 4]) -> Status {
        match check(&RenderInfoRequest { query, arguments, ..Default::default() }) {
            Ok(()) => Status::OK,
            Err(failure) => failure.status,
        }
    }

    #[test]
    fn queries_of_the_runtimes_pass_and_others_do_not() {
        // What rocminfo asks, traced natively: ACCEL_WORKING, DEV_INFO, READ_MMR_REG of 0x263e.
        assert_eq!(verdict(0x00, [0; 4]), Status::OK);
        assert_eq!(verdict(0x16, [0; 4]), Status::OK);
        assert_eq!(verdict(0x15, [0x263e, 1, 0xffff_ffff, 0]), Status::OK);
        assert_eq!(verdict(0x02, [2, 0, 0, 0]), Status::OK);
        assert_eq!(verdict(0x1b, [1, 0, 0, 0]), Status::NOT_SUPPORTED, "the video BIOS");
        assert_eq!(verdict(0x23, [0; 4]), Status::NOT_SUPPORTED, "the last fault of any process");
        assert_eq!(verdict(0xffff, [0; 4]), Status::NOT_SUPPORTED);
    }

    #[test]
    fn one_register_can_be_read() {
        for arguments in [[0x263d, 1, 0, 0], [0x263e, 2, 0, 0], [0x263e, 0, 0, 0], [0x263e, 1, 0, 1]] {
            assert_eq!(verdict(0x15, arguments), Status::INVALID, "{arguments:?}");
        }
        assert_eq!(verdict(0x16, [1, 0, 0, 0]), Status::INVALID);
        assert_eq!(verdict(0x0e, [0x100, 0, 0, 0]), Status::INVALID);
    }

    #[test]
    fn vram_is_shown_within_its_limit() {
        let heap = HeapInfo { total_heap_size: 16, usable_heap_size: 15, heap_usage: 3, max_allocation: 12 };
        let info = MemoryInfo { vram: heap, cpu_accessible_vram: heap, gtt: heap };
        let mut bytes = info.as_bytes().to_vec();
        limit_vram(AMDGPU_INFO_MEMORY, &mut bytes, 13);
        let shown = MemoryInfo::read_from_bytes(&bytes).unwrap();
        let limited =
            HeapInfo { total_heap_size: 13, usable_heap_size: 13, heap_usage: 3, max_allocation: 12 };
        assert_eq!((shown.vram, shown.cpu_accessible_vram, shown.gtt), (limited, limited, heap));
        let mut short = bytes[..40].to_vec();
        limit_vram(AMDGPU_INFO_MEMORY, &mut short, 1);
        assert_eq!(short, bytes[..40], "a cut answer is left alone");
    }
}
