//! virtio-gpu commands, byte by byte as in virtio 1.3, section 5.7.6, and frames.

use virtio_kfd_protocol::calls::{Hello, Nop, SetEvent};
use virtio_kfd_protocol::frame::{AnswerArea, AnswerFrame, RequestFrameBuilder};
use virtio_kfd_protocol::{EventId, EventRequest, HelloRequest, Nothing, ResourceId, Status};

use crate::vmm::{SCRATCH, Vmm};

pub const GET_DISPLAY_INFO: u32 = 0x100;
pub const RESOURCE_UNREF: u32 = 0x102;
pub const GET_CAPSET_INFO: u32 = 0x108;
pub const GET_CAPSET: u32 = 0x109;
pub const CREATE_BLOB: u32 = 0x10c;
pub const CTX_CREATE: u32 = 0x200;
pub const CTX_DESTROY: u32 = 0x201;
pub const CTX_ATTACH: u32 = 0x202;
pub const CTX_DETACH: u32 = 0x203;
pub const SUBMIT_3D: u32 = 0x207;
pub const MAP_BLOB: u32 = 0x208;
pub const UNMAP_BLOB: u32 = 0x209;

pub const OK: u32 = 0x1100;
pub const OK_CAPSET_INFO: u32 = 0x1102;
pub const OK_CAPSET: u32 = 0x1103;
pub const OK_MAP_INFO: u32 = 0x1106;
pub const UNSPEC: u32 = 0x1200;
pub const OUT_OF_MEMORY: u32 = 0x1201;
pub const BAD_RESOURCE: u32 = 0x1203;
pub const BAD_CONTEXT: u32 = 0x1204;
pub const BAD_PARAMETER: u32 = 0x1205;

pub const FENCE: u32 = 1;
pub const RING_IDX: u32 = 2;

/// Bytes of the blob for a context's answers.
pub const ANSWER_BYTES: u64 = 0x10000;

/// Where a context's answers go.
pub fn answers(ctx: u32) -> u64 {
    SCRATCH + u64::from(ctx) * ANSWER_BYTES
}

/// The blob there.
pub fn answer_blob(ctx: u32) -> u32 {
    1000 + ctx
}

pub fn header(kind: u32, ctx: u32) -> Vec<u8> {
    fenced(kind, 0, 0, ctx, 0)
}

pub fn fenced(kind: u32, flags: u32, fence: u64, ctx: u32, ring: u8) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(flags.to_le_bytes());
    bytes.extend(fence.to_le_bytes());
    bytes.extend(ctx.to_le_bytes());
    bytes.extend([ring, 0, 0, 0]);
    bytes
}

fn with(mut bytes: Vec<u8>, words: &[u32]) -> Vec<u8> {
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

pub fn simple(kind: u32, ctx: u32, words: &[u32]) -> Vec<u8> {
    with(header(kind, ctx), words)
}

pub fn ctx_create(ctx: u32, context_init: u32) -> Vec<u8> {
    let mut bytes = simple(CTX_CREATE, ctx, &[4, context_init]);
    bytes.extend(b"test");
    bytes.resize(24 + 8 + 64, 0);
    bytes
}

/// CREATE_BLOB with `nr_entries` as given and the entries behind it.
pub fn create_blob(
    ctx: u32,
    resource: u32,
    mem: u32,
    blob_id: u64,
    size: u64,
    nr: u32,
    entries: &[(u64, u32)],
) -> Vec<u8> {
    let mut bytes = simple(CREATE_BLOB, ctx, &[resource, mem, 1, nr]);
    bytes.extend(blob_id.to_le_bytes());
    bytes.extend(size.to_le_bytes());
    for (address, len) in entries {
        bytes.extend(address.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend([0; 4]);
    }
    bytes
}

pub fn guest_blob(ctx: u32, resource: u32, size: u64, entries: &[(u64, u32)]) -> Vec<u8> {
    create_blob(ctx, resource, 1, 0, size, entries.len() as u32, entries)
}

pub fn host_blob(ctx: u32, resource: u32, buffer: u32, size: u64) -> Vec<u8> {
    create_blob(ctx, resource, 2, u64::from(buffer) | 1 << 32, size, 0, &[])
}

pub fn map_blob(resource: u32, offset: u64) -> Vec<u8> {
    let mut bytes = simple(MAP_BLOB, 0, &[resource, 0]);
    bytes.extend(offset.to_le_bytes());
    bytes
}

pub fn kind(response: &[u8]) -> u32 {
    u32::from_le_bytes(response[..4].try_into().unwrap())
}

pub fn fence_of(response: &[u8]) -> u64 {
    u64::from_le_bytes(response[8..16].try_into().unwrap())
}

/// A fenced SUBMIT_3D.
pub fn submit(ctx: u32, ring: u8, fence: u64, frame: &[u8]) -> Vec<u8> {
    let mut bytes = with(fenced(SUBMIT_3D, FENCE | RING_IDX, fence, ctx, ring), &[frame.len() as u32, 0]);
    bytes.extend(frame);
    bytes
}

/// A frame whose answer goes to `offset` of a blob.
pub fn frame(blob: u32, offset: u64) -> RequestFrameBuilder {
    let area = AnswerArea { resource: ResourceId(blob), offset, capacity: 0x400 };
    RequestFrameBuilder::new(1, 7, area)
}

pub fn nop(ctx: u32, offset: u64) -> Vec<u8> {
    let mut builder = frame(answer_blob(ctx), offset);
    builder.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    builder.finish()
}

pub fn hello(ctx: u32, offset: u64) -> Vec<u8> {
    let mut builder = frame(answer_blob(ctx), offset);
    builder
        .push::<Hello>(&HelloRequest { version_min: 1, version_max: 1, ..Default::default() }, &[], 0)
        .unwrap();
    builder.finish()
}

/// A frame that makes the stub misbehave.
pub fn event(ctx: u32, id: u32, offset: u64) -> Vec<u8> {
    let mut builder = frame(answer_blob(ctx), offset);
    let request = EventRequest { event_id: EventId(id), ..Default::default() };
    builder.push::<SetEvent>(&request, &[], 0).unwrap();
    builder.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    builder.finish()
}

/// Statuses in the answer frame at this address.
pub fn statuses(vmm: &Vmm, address: u64) -> Vec<Status> {
    let bytes = vmm.read(address, 0x400);
    let answer = AnswerFrame::parse(&bytes).unwrap();
    assert_eq!(answer.header.sequence, 7);
    answer.answers.iter().map(|record| record.header.status).collect()
}

/// A context with a blob for answers.
pub fn open_context(vmm: &mut Vmm, ctx: u32) {
    assert_eq!(kind(&vmm.command(&ctx_create(ctx, 8))), OK);
    let entries = [(answers(ctx), ANSWER_BYTES as u32)];
    assert_eq!(kind(&vmm.command(&guest_blob(ctx, answer_blob(ctx), ANSWER_BYTES, &entries))), OK);
}

/// Sends a Nop and sees its answer: the context works.
pub fn check_context(vmm: &mut Vmm, ctx: u32) {
    assert_eq!(run(vmm, ctx, &nop(ctx, 0)), [Status::OK]);
}

/// Sends a frame whose answer goes to offset 0, and returns the answer's statuses.
pub fn run(vmm: &mut Vmm, ctx: u32, frame: &[u8]) -> Vec<Status> {
    vmm.write(answers(ctx), &[0; 64]);
    let response = vmm.command(&submit(ctx, 0, 1, frame));
    assert_eq!((kind(&response), fence_of(&response)), (OK, 1));
    statuses(vmm, answers(ctx))
}
