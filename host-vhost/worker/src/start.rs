//! From the settings to a confined process with everything open.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use kfd_host::kfd::KFD_PATH;
use kfd_host::topology::{self, GpuNode, TOPOLOGY_PATH, TopologyError};
use kfd_host::{Kfd, KfdError, RenderNode, SmiPlaces};
use kfd_ipc::ledger::{Account, Counted, Ledger};
use kfd_ipc::worker::{CuMask, Settings};
use kfd_ipc::{Channel, IPC_FD, IpcError};
use kfd_sandbox::lists::SMI_DESCRIPTORS;
use kfd_sandbox::{Role, SandboxError};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use thiserror::Error;
use virtio_kfd_protocol::GpuId;
use virtio_kfd_protocol::limits::MAX_GPUS;
use virtio_kfd_protocol::topology::ArchiveError;

use crate::MODEL_VARIABLE;
use crate::archive::Archive;
use crate::context::{Context, Gpu};
use crate::memory::{Limits, Memory};
use crate::queue::Queues;
use crate::select::{SelectError, gfx_name, select};
use crate::smi::Smi;

/// Bytes that the main thread's stack may grow to.
const STACK_BYTES: u64 = 8 << 20;

/// Why the worker cannot start: one sentence for the operator.
#[derive(Debug, Error)]
pub enum StartError {
    /// There is no KFD.
    #[error(
        "{KFD_PATH} does not exist: load the kernel module amdgpu (modprobe amdgpu), built with KFD (CONFIG_HSA_AMD), or start with --kfd model:gfx906 where there is no GPU"
    )]
    NoKfd,
    /// This user may not open it.
    #[error("{KFD_PATH} may not be opened by user {uid}: add the user to the group that owns it (render)")]
    Forbidden {
        /// The user.
        uid: u32,
    },
    /// The kernel refuses the open for another reason.
    #[error("{0}: this kernel's KFD cannot be used; some kernels refuse it on a machine without an AMD GPU")]
    Open(KfdError),
    /// A call failed.
    #[error("{0}")]
    Kfd(#[from] KfdError),
    /// The interface is another one.
    #[error("KFD interface version {major}.{minor}: this program knows version 1")]
    Version {
        /// The kernel's.
        major: u32,
        /// The kernel's.
        minor: u32,
    },
    /// XNACK is on and stays so.
    #[error("XNACK cannot be switched off: faults of the GPU would reach memory of this process")]
    Xnack,
    /// The topology cannot be read.
    #[error("KFD topology: {0}")]
    Topology(#[from] TopologyError),
    /// The selectors do not fit.
    #[error("{0}")]
    Select(#[from] SelectError),
    /// A mask of compute units that the kernel would not take.
    #[error(
        "the mask of compute units for {gpu} has one of a pair (0 and 1, 2 and 3, ...), which work together there: name both or none"
    )]
    HalfCuMask {
        /// Its name.
        gpu: String,
    },
    /// A mask with compute units that there are not.
    #[error("--cu-mask names unit {unit} of {gpu}, which has {units} (0 to {last})", last = units.saturating_sub(1))]
    NoSuchCu {
        /// The GPU's name.
        gpu: String,
        /// The largest one that is named.
        unit: u32,
        /// How many there are.
        units: u32,
    },
    /// More GPUs than the protocol has room for.
    #[error("{found} GPUs are selected, at most {MAX_GPUS} can be given to a VM: use --gpu")]
    TooManyGpus {
        /// How many.
        found: usize,
    },
    /// A render node cannot be opened.
    #[error("the render node of GPU {gpu_id} cannot be used: {error}")]
    Render {
        /// KFD's id of the GPU.
        gpu_id: u32,
        /// Why.
        error: KfdError,
    },
    /// The topology does not fit in an archive.
    #[error("{0}")]
    Archive(#[from] ArchiveError),
    /// The page on which the VM's use of memory is counted.
    #[error("the ledger of the VM: {0}")]
    Ledger(#[from] IpcError),
    /// The process cannot be confined.
    #[error("{0}")]
    Sandbox(#[from] SandboxError),
}

/// Opens everything and enters the sandbox.
pub fn start(
    settings: &Settings,
    ledger: Option<OwnedFd>,
    channel: Arc<Channel>,
) -> Result<Context, StartError> {
    limit_stack();
    let kfd = Kfd::open().map_err(open_error)?;
    let version = kfd.version()?;
    if version.major != kfd_abi::version::KFD_IOCTL_MAJOR_VERSION {
        return Err(StartError::Version { major: version.major, minor: version.minor });
    }
    switch_xnack_off(&kfd)?;
    let topology = topology::read(Path::new(TOPOLOGY_PATH))?;
    let all = topology.gpus()?;
    let chosen = select(&all, &settings.gpus)?;
    if chosen.len() > MAX_GPUS {
        return Err(StartError::TooManyGpus { found: chosen.len() });
    }
    let vram_limit = settings.vram_limit.into_iter().chain(settings.vm_vram_limit).min();
    let archive = Archive::new(&topology, &chosen, vram_limit)?;
    let masks = cu_masks(&all, &settings.cu_masks)?;
    let gpus: Result<Vec<Gpu>, StartError> =
        chosen.iter().map(|node| open_gpu(node, masks.get(&node.gpu_id).cloned())).collect();
    let ledger = ledger.map(Ledger::open).transpose()?.map(Arc::new);
    let account = |counted, limit: Option<u64>| {
        let slot = settings.ledger_slot as usize;
        Some(Account::new(ledger.clone()?, slot, counted, limit.unwrap_or(u64::MAX)))
    };
    let memory = Memory::new(Limits {
        vram: settings.vram_limit.unwrap_or(u64::MAX),
        system: settings.guest_memory_limit.unwrap_or(u64::MAX),
        vm_vram: account(Counted::Vram, settings.vm_vram_limit),
        vm_system: account(Counted::System, settings.vm_guest_memory_limit),
        buffers: settings.max_buffers as usize,
        runs: settings.max_runs,
    });
    let vm_queues = account(Counted::Queues, settings.vm_max_queues);
    let mut queues = Queues::new(settings.max_queues.into(), vm_queues);
    queues.exceptions.refused = settings.no_exceptions;
    let model = std::env::var_os(MODEL_VARIABLE).is_some();
    // A model has the numbers that this process sees.
    let smi = Smi::new(SmiPlaces::reserve(SMI_DESCRIPTORS), model || threads_are_known_to_all());
    let context = Context::new(kfd, version, gpus?, archive, vram_limit, (memory, queues, smi), channel);
    let report = kfd_sandbox::enter(Role::Worker { channel: IPC_FD, model })?;
    // Not for every log: a guest can make contexts without end.
    tracing::debug!(
        "{}: KFD {}.{}, {} GPUs; {report}",
        settings.name,
        version.major,
        version.minor,
        context.gpus.len()
    );
    Ok(context)
}

/// Linux's common limit. The one that this process was started with is for where its mappings are (`WORKER_STACK_LIMIT` of the
/// daemon), which was settled by then.
fn limit_stack() {
    let lowered = getrlimit(Resource::RLIMIT_STACK)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_STACK, STACK_BYTES.min(hard), hard));
    if let Err(error) = lowered {
        tracing::warn!("the limit of the stack stays: {error}");
    }
}

/// Whether threads of this process have for it the numbers that the kernel prints (`pid_nr` of `PROC_PID_INIT_INO`, the first PID namespace of the
/// machine). Where that cannot be seen they are taken for others.
fn threads_are_known_to_all() -> bool {
    const FIRST_NAMESPACE: u64 = 0xefff_fffc;
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST_NAMESPACE)
}

/// A process begins with XNACK where all GPUs retry faults (`amdgpu.noretry=0`; kfd_process_xnack_mode). Why it must be
/// off stands at [`crate::call::process::set_xnack_mode`]. A kernel without the call has no XNACK.
fn switch_xnack_off(kfd: &Kfd) -> Result<(), StartError> {
    match kfd.set_xnack_mode(-1) {
        Ok(0) | Err(_) => return Ok(()),
        Ok(_) => {}
    }
    kfd.set_xnack_mode(0)?;
    match kfd.set_xnack_mode(-1)? {
        0 => Ok(()),
        _ => Err(StartError::Xnack),
    }
}

fn open_gpu(node: &GpuNode, cu_mask: Option<Vec<u32>>) -> Result<Gpu, StartError> {
    let render = RenderNode::open(node.render_minor)
        .map_err(|error| StartError::Render { gpu_id: node.gpu_id, error })?;
    let (gfx, xccs) = (node.gfx_target_version, node.xccs);
    Ok(Gpu { id: GpuId(node.gpu_id), render, gfx, xccs, cu_mask })
}

/// The operator's masks by gpu_id.
fn cu_masks(all: &[GpuNode], masks: &[CuMask]) -> Result<HashMap<u32, Vec<u32>>, StartError> {
    let mut by_gpu = HashMap::new();
    for mask in masks {
        let selectors: Vec<String> = mask.gpu.iter().cloned().collect();
        for gpu in select(all, &selectors)? {
            // The kernel leaves out what is not there, and a queue without a unit would never run.
            if let Some(unit) = largest(&mask.words).filter(|unit| gpu.cus > 0 && *unit >= gpu.cus) {
                let name = gfx_name(gpu.gfx_target_version);
                return Err(StartError::NoSuchCu { gpu: name, unit, units: gpu.cus });
            }
            // The kernel takes no halves of a work group processor (gfx10 and later; pqm_update_mqd).
            let halves = |word: &u32| (*word ^ (*word >> 1)) & 0x5555_5555 != 0;
            if gpu.gfx_target_version >= 100_000 && mask.words.iter().any(halves) {
                return Err(StartError::HalfCuMask { gpu: gfx_name(gpu.gfx_target_version) });
            }
            by_gpu.insert(gpu.gpu_id, mask.words.clone());
        }
    }
    Ok(by_gpu)
}

/// The largest unit of a mask.
fn largest(words: &[u32]) -> Option<u32> {
    let (word, bits) = (0u32..).zip(words).filter(|(_, bits)| **bits != 0).last()?;
    word.checked_mul(u32::BITS)?.checked_add(bits.checked_ilog2()?)
}

fn open_error(error: KfdError) -> StartError {
    match error.errno {
        Errno::ENOENT | Errno::ENXIO | Errno::ENODEV => StartError::NoKfd,
        Errno::EACCES | Errno::EPERM => StartError::Forbidden { uid: nix::unistd::Uid::effective().as_raw() },
        _ => StartError::Open(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_of_compute_units_are_for_the_gpus_they_name() {
        let gpu = |gpu_id, gfx_target_version| GpuNode { gpu_id, gfx_target_version, ..Default::default() };
        let all = [gpu(1, 90006), gpu(2, 90006), gpu(3, 100300)];
        let mask =
            |gpu: Option<&str>, words: &[u32]| CuMask { gpu: gpu.map(Into::into), words: words.into() };
        let masks = cu_masks(&all, &[mask(None, &[3]), mask(Some("gfx906"), &[5, 1]), mask(Some("1"), &[1])]);
        assert_eq!(masks.unwrap(), HashMap::from([(1, vec![5, 1]), (2, vec![1]), (3, vec![3])]));
        let halves = cu_masks(&all, &[mask(Some("2"), &[3, 1 << 31])]).unwrap_err().to_string();
        assert!(halves.contains("gfx1030") && halves.contains("pair"), "{halves}");
        assert!(cu_masks(&all, &[mask(Some("2"), &[0, 0xc000_000c])]).is_ok());
        assert!(cu_masks(&all, &[mask(Some("gfx942"), &[1])]).is_err());
        // A gfx906 with 60 units.
        let mi50 = [GpuNode { cus: 60, ..gpu(1, 90006) }];
        assert!(cu_masks(&mi50, &[mask(None, &[u32::MAX, (1 << 28) - 1])]).is_ok());
        assert!(cu_masks(&mi50, &[mask(None, &[1, 0, 0])]).is_ok());
        let sentence = cu_masks(&mi50, &[mask(None, &[1, 1 << 28])]).unwrap_err().to_string();
        assert_eq!(sentence, "--cu-mask names unit 60 of gfx906, which has 60 (0 to 59)");
        assert!(cu_masks(&mi50, &[mask(None, &[0, 0, 1])]).unwrap_err().to_string().contains("unit 64"));
    }

    #[test]
    fn sentences_say_what_is_missing_and_what_to_do() {
        let sentence = |errno| open_error(KfdError::new("open", KFD_PATH, errno)).to_string();
        let missing = sentence(Errno::ENOENT);
        assert!(
            missing.contains("/dev/kfd does not exist") && missing.contains("modprobe amdgpu"),
            "{missing}"
        );
        let forbidden = sentence(Errno::EACCES);
        assert!(forbidden.contains("group") && forbidden.contains("render"), "{forbidden}");
        let refused = sentence(Errno::EINVAL);
        assert!(refused.contains("open(/dev/kfd): EINVAL"), "{refused}");
    }
}
