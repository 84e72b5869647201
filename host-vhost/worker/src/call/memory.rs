//! Buffers and their mappings.

use kfd_host::{HdpRegister, Metadata};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AllocMemory, AvailableMemory, BufferMetadata, FlushHdp, FreeMemory, ImportMemory, MapMemory, MapRange,
    ResourceInfo, SetBufferMetadata, ShareMemory, UnmapMemory, UnmapRange, UnshareMemory,
};
use virtio_kfd_protocol::{
    AllocMemoryAnswer, AllocMemoryRequest, AvailableMemoryAnswer, BufferMetadataAnswer,
    BufferMetadataRequest, BufferRequest, CallType, FlushHdpRequest, GpuId, GpuRequest, ImportMemoryAnswer,
    ImportMemoryRequest, MapMemoryAnswer, MapRangeRequest, Nothing, ResourceInfoAnswer, ResourceRequest,
    SetBufferMetadataRequest, ShareMemoryAnswer, ShareMemoryRequest, UnmapRangeRequest, UnshareMemoryRequest,
};

use super::{Made, Outcome, Reply};
use crate::context::Context;
use crate::failure::{Failure, errno_number, expect_zero};

pub fn alloc_memory(context: &Context, request: &AllocMemoryRequest) -> Outcome<AllocMemory> {
    expect_zero("AllocMemory", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    let mut memory = context.memory();
    let handle = memory.alloc(context, request)?;
    let mappable = memory.buffer(handle)?.is_mappable();
    Ok(Reply::of(AllocMemoryAnswer { handle, mappable: mappable.into(), pad: 0 }))
}

pub fn free_memory(context: &Context, made: &Made, request: &BufferRequest) -> Outcome<FreeMemory> {
    context.memory().free(context, made.resolve(request.handle)?)?;
    Ok(Reply::of(Nothing {}))
}

pub fn map_memory(
    context: &Context,
    made: &Made,
    request: &BufferRequest,
    gpus: &[GpuId],
) -> Outcome<MapMemory> {
    check_gpus(context, gpus)?;
    let outcome = context.memory().map(context, made.resolve(request.handle)?, gpus)?;
    Ok(map_reply(outcome))
}

pub fn unmap_memory(
    context: &Context,
    made: &Made,
    request: &BufferRequest,
    gpus: &[GpuId],
) -> Outcome<UnmapMemory> {
    check_gpus(context, gpus)?;
    let outcome = context.memory().unmap(context, made.resolve(request.handle)?, gpus)?;
    Ok(map_reply(outcome))
}

fn check_gpus(context: &Context, gpus: &[GpuId]) -> Result<(), Failure> {
    gpus.iter().try_for_each(|gpu| context.gpu(*gpu).map(drop))
}

fn map_reply<C: CallType<Answer = MapMemoryAnswer>>((n_success, errno): (u32, Option<Errno>)) -> Reply<C> {
    let fixed = MapMemoryAnswer { n_success, errno: errno.map_or(0, errno_number) };
    Reply { fixed, tail: Vec::new(), failed: errno.is_some() }
}

/// What the kernel has, and no more than this context may still use.
pub fn available_memory(context: &Context, request: &GpuRequest) -> Outcome<AvailableMemory> {
    expect_zero("AvailableMemory", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    let available = context.kfd.available_memory(request.gpu_id.0)?;
    Ok(Reply::of(AvailableMemoryAnswer { available: available.min(context.memory().vram_left()) }))
}

pub fn map_range(context: &Context, made: &Made, request: &MapRangeRequest) -> Outcome<MapRange> {
    let handle = made.resolve(request.handle)?;
    context.memory().map_range(context, handle, request)?;
    Ok(Reply::of(Nothing {}))
}

pub fn unmap_range(context: &Context, made: &Made, request: &UnmapRangeRequest) -> Outcome<UnmapRange> {
    expect_zero("UnmapRange", &[request.pad.into()])?;
    let handle = made.resolve(request.handle)?;
    context.memory().unmap_range(context, handle, request)?;
    Ok(Reply::of(Nothing {}))
}

pub fn share_memory(context: &Context, made: &Made, request: &ShareMemoryRequest) -> Outcome<ShareMemory> {
    let handle = made.resolve(request.handle)?;
    let token = context.memory().share(context, handle, request)?;
    Ok(Reply::of(ShareMemoryAnswer { token }))
}

pub fn unshare_memory(context: &Context, request: &UnshareMemoryRequest) -> Outcome<UnshareMemory> {
    context.memory().unshare(context, request.token)?;
    Ok(Reply::of(Nothing {}))
}

pub fn import_memory(context: &Context, request: &ImportMemoryRequest) -> Outcome<ImportMemory> {
    context.gpu(request.gpu_id)?;
    let (handle, size) = context.memory().import(context, request)?;
    Ok(Reply::of(ImportMemoryAnswer { handle, size }))
}

pub fn resource_info(context: &Context, request: &ResourceRequest) -> Outcome<ResourceInfo> {
    expect_zero("ResourceInfo", &[request.pad.into()])?;
    let info: ResourceInfoAnswer = context.memory().resource_info(context, request.resource)?;
    Ok(Reply::of(info))
}

pub fn buffer_metadata(
    context: &Context,
    made: &Made,
    request: &BufferMetadataRequest,
) -> Outcome<BufferMetadata> {
    expect_zero("BufferMetadata", &[request.pad.into()])?;
    let handle = made.resolve(request.handle)?;
    let Metadata { flags, tiling, bytes } = context.memory().metadata(context, handle, request.gpu_id)?;
    Ok(Reply::with(BufferMetadataAnswer { flags, tiling }, bytes))
}

pub fn set_buffer_metadata(
    context: &Context,
    made: &Made,
    request: &SetBufferMetadataRequest,
    bytes: &[u8],
) -> Outcome<SetBufferMetadata> {
    expect_zero("SetBufferMetadata", &[request.pad.into()])?;
    let handle = made.resolve(request.handle)?;
    let metadata = Metadata { flags: request.flags, tiling: request.tiling, bytes: bytes.to_vec() };
    context.memory().set_metadata(context, handle, request.gpu_id, &metadata)?;
    Ok(Reply::of(Nothing {}))
}

/// Without the memory's lock, so that no other call waits for the GPU's bus.
pub fn flush_hdp(context: &Context, made: &Made, request: &FlushHdpRequest) -> Outcome<FlushHdp> {
    expect_zero("FlushHdp", &[request.pad.into()])?;
    let register = HdpRegister::at(request.register)
        .ok_or_else(|| Failure::invalid(format!("FlushHdp: no register at {:#x}", request.register)))?;
    let handle = made.resolve(request.handle)?;
    let page = context.memory().hdp_page(handle)?;
    page.flush(register);
    Ok(Reply::of(Nothing {}))
}
