//! The one call table. Opcodes, dispatch, size checks, the worker's ioctl allow-list, the protocol page and the
//! fuzz dictionary come from here; nothing is listed a second time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::call::*;
use crate::frame::{DecodeError, RawRequest, read_fixed, read_tail};
use crate::limits::*;

/// A call as a type: what its request and answer consist of.
pub trait CallType {
    /// Fixed part of the request.
    type Request: FromBytes + IntoBytes + Immutable + KnownLayout + Copy;
    /// Element of the request's tail.
    type RequestTail: FromBytes + IntoBytes + Immutable + KnownLayout + Copy;
    /// Fixed part of the answer.
    type Answer: FromBytes + IntoBytes + Immutable + KnownLayout + Copy;
    /// Element of the answer's tail.
    type AnswerTail: FromBytes + IntoBytes + Immutable + KnownLayout + Copy;
    /// Most elements of the request's tail.
    const REQUEST_TAIL_MAX: usize;
    /// Most elements of the answer's tail.
    const ANSWER_TAIL_MAX: usize;
    /// The call.
    const CALL: Call;
}

/// Which ring a call goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// It does not block: ring 0, or any other.
    Any,
    /// It may block for as long as the guest says: any ring but 0.
    Waiting,
}

/// A row of the call table.
#[derive(Clone, Copy, Debug)]
pub struct CallInfo {
    /// The call.
    pub call: Call,
    /// Its number on the wire.
    pub opcode: u32,
    /// Its name.
    pub name: &'static str,
    /// The noun that its files are named after, in each crate.
    pub noun: &'static str,
    /// Bytes of the request's fixed part.
    pub request_size: usize,
    /// Bytes of an element of the request's tail.
    pub request_element: usize,
    /// Most elements of the request's tail.
    pub request_max: usize,
    /// Bytes of the answer's fixed part.
    pub answer_size: usize,
    /// Bytes of an element of the answer's tail.
    pub answer_element: usize,
    /// Most elements of the answer's tail.
    pub answer_max: usize,
    /// Where it may be sent.
    pub ring: Ring,
    /// The `/dev/kfd` ioctl numbers (`_IOC_NR`) that the worker makes for it.
    pub kfd_ioctls: &'static [u8],
    /// The render-node ioctl numbers (`_IOC_NR`) that the worker makes for it.
    pub drm_ioctls: &'static [u8],
    /// What it does.
    pub doc: &'static str,
}

macro_rules! calls {
    ($(
        $(#[doc = $doc:literal])*
        $opcode:literal $noun:ident $name:ident {
            request: $request:ty, [$rtail:ty; $rmax:expr];
            answer: $answer:ty, [$atail:ty; $amax:expr];
            ring: $ring:ident; kfd: [$($kfd:literal),*]; drm: [$($drm:literal),*];
        }
    )*) => {
        /// A known call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Call { $($(#[doc = $doc])* $name = $opcode,)* }

        /// The table, in the order of the call numbers.
        pub const CALLS: &[CallInfo] = &[$(CallInfo {
            call: Call::$name,
            opcode: $opcode,
            name: stringify!($name),
            noun: stringify!($noun),
            request_size: size_of::<$request>(),
            request_element: size_of::<$rtail>(),
            request_max: $rmax,
            answer_size: size_of::<$answer>(),
            answer_element: size_of::<$atail>(),
            answer_max: $amax,
            ring: Ring::$ring,
            kfd_ioctls: &[$($kfd),*],
            drm_ioctls: &[$($drm),*],
            doc: concat!($($doc),*),
        },)*];

        $(const _: () = {
            assert!(size_of::<$request>() % 8 == 0, "fixed parts are multiples of 8 bytes");
            assert!(size_of::<$answer>() % 8 == 0, "fixed parts are multiples of 8 bytes");
            assert!(size_of::<$rtail>() > 0 && size_of::<$atail>() > 0, "elements have a size");
            assert!($opcode >= 0x100, "numbers below 0x100 belong to another dialect");
        };)*

        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl CallType for $name {
                type Request = $request;
                type RequestTail = $rtail;
                type Answer = $answer;
                type AnswerTail = $atail;
                const REQUEST_TAIL_MAX: usize = $rmax;
                const ANSWER_TAIL_MAX: usize = $amax;
                const CALL: Call = Call::$name;
            }
        )*

        /// A request, read and bounded.
        #[derive(Clone, Debug)]
        pub enum Request { $(
            $(#[doc = $doc])*
            $name {
                /// The fixed part.
                fixed: $request,
                /// The tail.
                tail: Vec<$rtail>,
            },
        )* }

        impl Request {
            /// Reads a request of a checked frame.
            pub fn decode(raw: &RawRequest<'_>) -> Result<Self, DecodeError> {
                match raw.header.opcode {
                    $($opcode => Ok(Request::$name {
                        fixed: read_fixed(Call::$name, raw.fixed)?,
                        tail: read_tail(Call::$name, raw.tail, $rmax)?,
                    }),)*
                    other => Err(DecodeError::UnknownCall(other)),
                }
            }

            /// Which call it is.
            pub const fn call(&self) -> Call {
                match self { $(Request::$name { .. } => Call::$name,)* }
            }
        }

        impl Call {
            /// The call with this number.
            pub const fn from_opcode(opcode: u32) -> Option<Call> {
                match opcode { $($opcode => Some(Call::$name),)* _ => None }
            }

            /// Its number on the wire.
            pub const fn opcode(self) -> u32 {
                self as u32
            }

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Call::$name => stringify!($name),)* }
            }

            /// Where it may be sent.
            pub const fn ring(self) -> Ring {
                match self { $(Call::$name => Ring::$ring,)* }
            }
        }
    };
}

calls! {
    /// The handshake; the first request of a context. Answers the version that both sides use from then on.
    0x100 open Hello {
        request: HelloRequest, [u8; 0]; answer: HelloAnswer, [u8; 0];
        ring: Any; kfd: [0x01]; drm: [];
    }
    /// Does nothing: measures a round trip and shows that the worker is alive.
    0x101 open Nop {
        request: Nothing, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// A piece of the topology archive (see [`crate::topology`]): the nodes that this VM may see, as the files of
    /// `/sys/devices/virtual/kfd/kfd/topology` read at one generation.
    0x110 topology TopologyRead {
        request: TopologyReadRequest, [u8; 0]; answer: TopologyReadAnswer, [u8; MAX_TOPOLOGY_CHUNK];
        ring: Any; kfd: []; drm: [];
    }
    /// `AMDKFD_IOC_GET_PROCESS_APERTURES_NEW`
    0x120 process GetApertures {
        request: Nothing, [u8; 0]; answer: Nothing, [Apertures; MAX_GPUS];
        ring: Any; kfd: [0x14]; drm: [];
    }
    /// `AMDKFD_IOC_ACQUIRE_VM` on the render node that belongs to the GPU, which the worker opens.
    0x121 process AcquireVm {
        request: GpuRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x15]; drm: [];
    }
    /// `AMDKFD_IOC_SET_MEMORY_POLICY`
    0x122 process SetMemoryPolicy {
        request: SetMemoryPolicyRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x04]; drm: [];
    }
    /// `AMDKFD_IOC_GET_CLOCK_COUNTERS`; CPU and system counters are the host's.
    0x123 process GetClockCounters {
        request: GpuRequest, [u8; 0]; answer: ClockCounters, [u8; 0];
        ring: Any; kfd: [0x05]; drm: [];
    }
    /// `AMDKFD_IOC_SET_XNACK_MODE`; a negative value asks for the mode.
    0x124 process SetXnackMode {
        request: XnackMode, [u8; 0]; answer: XnackMode, [u8; 0];
        ring: Any; kfd: [0x21]; drm: [];
    }
    /// `AMDKFD_IOC_SET_SCRATCH_BACKING_VA`
    0x125 process SetScratchBackingVa {
        request: SetScratchBackingVaRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x11]; drm: [];
    }
    /// `AMDKFD_IOC_SET_TRAP_HANDLER`
    0x126 process SetTrapHandler {
        request: SetTrapHandlerRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x13]; drm: [];
    }
    /// `AMDKFD_IOC_RUNTIME_ENABLE`; enables or disables by `mode`.
    0x127 process RuntimeEnable {
        request: RuntimeEnableRequest, [u8; 0]; answer: RuntimeEnableAnswer, [u8; 0];
        ring: Any; kfd: [0x25]; drm: [];
    }
    /// `AMDKFD_IOC_GET_TILE_CONFIG`; the tail holds the tile entries, then the macro tile entries.
    0x128 process GetTileConfig {
        request: GetTileConfigRequest, [u8; 0]; answer: GetTileConfigAnswer, [u32; MAX_TILE_CONFIGS * 2];
        ring: Any; kfd: [0x12]; drm: [];
    }
    /// `AMDKFD_IOC_ALLOC_MEMORY_OF_GPU` at the guest's address; over a GUEST blob it is a user-pointer buffer.
    0x140 memory AllocMemory {
        request: AllocMemoryRequest, [u8; 0]; answer: AllocMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x16]; drm: [];
    }
    /// `AMDKFD_IOC_FREE_MEMORY_OF_GPU`
    0x141 memory FreeMemory {
        request: BufferRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x17]; drm: [];
    }
    /// `AMDKFD_IOC_MAP_MEMORY_TO_GPU`; the tail lists the GPUs.
    0x142 memory MapMemory {
        request: BufferRequest, [GpuIdElement; MAX_GPUS]; answer: MapMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x18]; drm: [];
    }
    /// `AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU`; the tail lists the GPUs.
    0x143 memory UnmapMemory {
        request: BufferRequest, [GpuIdElement; MAX_GPUS]; answer: MapMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x19]; drm: [];
    }
    /// `AMDKFD_IOC_AVAILABLE_MEMORY`, bounded by what this VM may use.
    0x144 memory AvailableMemory {
        request: GpuRequest, [u8; 0]; answer: AvailableMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x23]; drm: [];
    }
    /// `DRM_IOCTL_AMDGPU_GEM_VA`, map: a piece of a buffer at an address of one GPU. The buffer may have addresses of its
    /// own or none; it reaches the GPU's render node as a dma-buf.
    0x145 memory MapRange {
        request: MapRangeRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x24]; drm: [0x2e, 0x48];
    }
    /// `DRM_IOCTL_AMDGPU_GEM_VA`, unmap: what a MapRange with the same address, size and GPU made.
    0x146 memory UnmapRange {
        request: UnmapRangeRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [0x48];
    }
    /// Lets other contexts of this VM have a piece of a buffer (`AMDKFD_IOC_EXPORT_DMABUF`): a HOST3D blob whose `blob_id`
    /// is the token shows it in any context that was told the token, and ImportMemory takes it there.
    0x147 memory ShareMemory {
        request: ShareMemoryRequest, [u8; 0]; answer: ShareMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x24]; drm: [];
    }
    /// A buffer over the memory of another context's HOST3D blob that is attached to this one
    /// (`AMDKFD_IOC_IMPORT_DMABUF`).
    0x148 memory ImportMemory {
        request: ImportMemoryRequest, [u8; 0]; answer: ImportMemoryAnswer, [u8; 0];
        ring: Any; kfd: [0x1c, 0x1d]; drm: [0x2e, 0x09];
    }
    /// What is behind a blob of this context (`AMDKFD_IOC_GET_DMABUF_INFO` for memory of the host).
    0x149 memory ResourceInfo {
        request: ResourceRequest, [u8; 0]; answer: ResourceInfoAnswer, [u8; 0];
        ring: Any; kfd: [0x1c]; drm: [];
    }
    /// Ends a token before its buffer is freed. Who has the memory by then keeps it.
    0x14a memory UnshareMemory {
        request: UnshareMemoryRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// A store to one of a GPU's registers that flush the host data path (HDP), through the page that the worker has mapped
    /// of a buffer of `KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP`. The answer comes when the store is done.
    0x14b memory FlushHdp {
        request: FlushHdpRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// `DRM_IOCTL_AMDGPU_GEM_METADATA`, get: what programs left with the memory for others that have it. It is that of the host's
    /// whole buffer. The buffer reaches the GPU's render node as a dma-buf.
    0x14c memory BufferMetadata {
        request: BufferMetadataRequest, [u8; 0]; answer: BufferMetadataAnswer, [u8; MAX_METADATA_BYTES];
        ring: Any; kfd: [0x24]; drm: [0x2e, 0x46];
    }
    /// `DRM_IOCTL_AMDGPU_GEM_METADATA`, set; the tail is what is left with the memory.
    0x14d memory SetBufferMetadata {
        request: SetBufferMetadataRequest, [u8; MAX_METADATA_BYTES]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x24]; drm: [0x2e, 0x46];
    }
    /// `AMDKFD_IOC_CREATE_EVENT`
    0x160 event CreateEvent {
        request: CreateEventRequest, [u8; 0]; answer: CreateEventAnswer, [u8; 0];
        ring: Any; kfd: [0x08]; drm: [];
    }
    /// `AMDKFD_IOC_DESTROY_EVENT`
    0x161 event DestroyEvent {
        request: EventRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x09]; drm: [];
    }
    /// `AMDKFD_IOC_SET_EVENT`
    0x162 event SetEvent {
        request: EventRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x0a]; drm: [];
    }
    /// `AMDKFD_IOC_RESET_EVENT`
    0x163 event ResetEvent {
        request: EventRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x0b]; drm: [];
    }
    /// `AMDKFD_IOC_WAIT_EVENTS`; blocks for up to the time-out.
    0x164 event WaitEvents {
        request: WaitEventsRequest, [WaitEvent; MAX_WAIT_EVENTS];
        answer: WaitEventsAnswer, [WaitEvent; MAX_WAIT_EVENTS];
        ring: Waiting; kfd: [0x0c]; drm: [];
    }
    /// `AMDKFD_IOC_CREATE_QUEUE`, and the operator's mask of compute units.
    0x180 queue CreateQueue {
        request: CreateQueueRequest, [u8; 0]; answer: CreateQueueAnswer, [u8; 0];
        ring: Any; kfd: [0x02]; drm: [];
    }
    /// `AMDKFD_IOC_DESTROY_QUEUE`
    0x181 queue DestroyQueue {
        request: QueueRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x03]; drm: [];
    }
    /// `AMDKFD_IOC_UPDATE_QUEUE`
    0x182 queue UpdateQueue {
        request: UpdateQueueRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x07]; drm: [];
    }
    /// `AMDKFD_IOC_SET_CU_MASK`; the tail is the mask, whose bits the operator's mask limits further.
    0x183 queue SetCuMask {
        request: QueueRequest, [u32; MAX_CU_MASK_WORDS]; answer: Nothing, [u8; 0];
        ring: Any; kfd: [0x1a]; drm: [];
    }
    /// `AMDKFD_IOC_GET_QUEUE_WAVE_STATE`; the tail of the answer is what the kernel wrote to the start of the save area.
    0x184 queue GetQueueWaveState {
        request: QueueRequest, [u8; 0]; answer: QueueWaveStateAnswer, [u8; MAX_CONTROL_STACK_BYTES];
        ring: Any; kfd: [0x1b]; drm: [];
    }
    /// `AMDKFD_IOC_ALLOC_QUEUE_GWS`
    0x185 queue AllocQueueGws {
        request: AllocQueueGwsRequest, [u8; 0]; answer: AllocQueueGwsAnswer, [u8; 0];
        ring: Any; kfd: [0x1e]; drm: [];
    }
    /// Guest memory that stands for a GPU's doorbells, one for each GPU and context at a time.
    0x188 queue DoorbellPage {
        request: DoorbellPageRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// Looks at the doorbells now, and says whether stores to them are announced from now on.
    0x189 queue RingDoorbells {
        request: RingDoorbellsRequest, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// Waits until no doorbell has rung for a while.
    0x18a queue WaitDoorbells {
        request: WaitDoorbellsRequest, [u8; 0]; answer: WaitDoorbellsAnswer, [u8; 0];
        ring: Waiting; kfd: []; drm: [];
    }
    /// A stream of a GPU's system management events (`AMDKFD_IOC_SMI_EVENTS`): those of the GPU as a whole and those of this
    /// context, with the ids of processes as the guest has them. All that are known are enabled.
    0x1a0 smi OpenSmi {
        request: GpuRequest, [u8; 0]; answer: SmiStream, [u8; 0];
        ring: Any; kfd: [0x1f]; drm: [];
    }
    /// Ends a stream.
    0x1a1 smi CloseSmi {
        request: SmiStream, [u8; 0]; answer: Nothing, [u8; 0];
        ring: Any; kfd: []; drm: [];
    }
    /// Waits for lines of any stream of the context; blocks for up to the time-out.
    0x1a2 smi ReadSmi {
        request: ReadSmiRequest, [u8; 0]; answer: ReadSmiAnswer, [u8; MAX_SMI_BYTES];
        ring: Waiting; kfd: []; drm: [];
    }
    /// `DRM_IOCTL_VERSION` of the GPU's render node.
    0x1e0 render RenderVersion {
        request: GpuRequest, [u8; 0]; answer: RenderVersionAnswer, [u8; 0];
        ring: Any; kfd: []; drm: [0x00];
    }
    /// `DRM_IOCTL_AMDGPU_INFO` with a query that the worker allows; the tail holds what the kernel wrote.
    0x1e1 render RenderInfo {
        request: RenderInfoRequest, [u8; 0]; answer: RenderInfoAnswer, [u8; MAX_RENDER_INFO_BYTES];
        ring: Any; kfd: []; drm: [0x45];
    }
}
