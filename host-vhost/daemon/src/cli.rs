//! The command line.

use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::Parser;
use kfd_ipc::worker::CuMask;

use crate::budget::{DEFAULT_MAX_CONTEXTS, DEFAULT_MAX_QUEUES_PER_PROCESS, PAGE};
use crate::pool::GRANULE;

/// What a SIZE is.
const SIZES: &str =
    "SIZE is a number of bytes, with an optional suffix K, M, G or T (powers of 1024), as in 512M.";

/// [`crate::budget::DEFAULT_WINDOW`], as it is shown.
const DEFAULT_WINDOW_TEXT: &str = "16G";

/// The vhost-user virtio-gpu device of virtio-kfd: GPU compute for one virtual machine.
///
/// QEMU 11.1 or newer connects with `-chardev socket,id=c0,path=PATH -device
/// vhost-user-test-device-pci,chardev=c0,virtio-id=16,num_vqs=2,vq_size=1024,config_size=20` and needs its memory
/// as `-object memory-backend-memfd,share=on`.
#[derive(Clone, Debug, Parser)]
#[command(name = "vhost-user-kfd", version, after_help = SIZES)]
pub struct Args {
    /// Listen on a new socket at PATH.
    #[arg(long, visible_alias = "socket-path", value_name = "PATH", conflicts_with = "fd")]
    pub socket: Option<PathBuf>,

    /// Use the open socket N, connected or listening.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    pub fd: Option<RawFd>,

    /// What is under the workers: the kernel's /dev/kfd (`real`), or a software model of a GPU (`model:PROFILE`).
    #[arg(long, value_name = "KFD", default_value = "real")]
    pub kfd: Kfd,

    /// A GPU that the VM sees; all of them if not given. An index, `gpu_id:N`, `renderD128`, a PCI address,
    /// `uuid:HEX` or a name as `gfx906`. May be given more than once.
    #[arg(long = "gpu", value_name = "SELECTOR")]
    pub gpus: Vec<String>,

    /// Most VRAM of the VM, over all its processes and GPUs.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub vram_limit: Option<u64>,

    /// Most VRAM of each guest process.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub vram_limit_per_process: Option<u64>,

    /// Most guest memory that is given to GPUs, over all guest processes.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub guest_memory_limit: Option<u64>,

    /// Most guest memory that each guest process gives to GPUs.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub guest_memory_limit_per_process: Option<u64>,

    /// Most queues of the VM, over all its processes and GPUs.
    #[arg(long, value_name = "N")]
    pub max_queues: Option<u32>,

    /// Most queues of each guest process.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_QUEUES_PER_PROCESS)]
    pub max_queues_per_process: u32,

    /// The compute units that the VM's queues may use, as `0-31,40`; with a GPU (`--gpu` has the forms) in front, as `0=0-31`,
    /// on that one. May be given more than once.
    #[arg(long = "cu-mask", value_name = "[GPU=]UNITS", value_parser = parse_cu_mask)]
    pub cu_masks: Vec<CuMask>,

    /// Refuse runtimes of guests that enable themselves, so that KFD handles no exceptions of their queues. For hosts whose VMs share a
    /// GPU and must not delay each other's events (docs/operating.md).
    #[arg(long)]
    pub no_exceptions: bool,

    /// Address space in the guest through which its CPUs reach memory of the host; a power of two.
    #[arg(long, value_name = "SIZE", value_parser = parse_window, default_value = DEFAULT_WINDOW_TEXT)]
    pub shmem_size: u64,

    /// Listen for a second device at PATH: a virtio-fs device with the tag `virtio-kfd`, through whose files guest
    /// processes get memory of the host that their kernel treats as ordinary pages (docs/operating.md).
    #[arg(long, value_name = "PATH", requires = "memory_size")]
    pub memory_socket: Option<PathBuf>,

    /// Most memory of the host that the guest gets through --memory-socket, at least 2M.
    #[arg(long, value_name = "SIZE", value_parser = parse_memory_size, requires = "memory_socket")]
    pub memory_size: Option<u64>,

    /// Most guest processes that use GPUs at a time. Each has a process on the host.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_CONTEXTS, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_contexts: u32,

    /// Exit when the VMM disconnects, and do not wait for the next connection.
    #[arg(long)]
    pub once: bool,

    /// Print what this program can do as JSON, as QEMU's vhost-user conventions have it, and exit.
    #[arg(long)]
    pub print_capabilities: bool,

    /// What is logged, as in `info` or `vhost_user_kfd=debug`.
    #[arg(long, value_name = "FILTER", default_value = "info", value_parser = parse_filter)]
    pub log: String,

    /// The worker program; beside this program if not given.
    #[arg(long, value_name = "PATH")]
    pub worker: Option<PathBuf>,

    /// The model's library; beside this program if not given.
    #[arg(long, value_name = "PATH")]
    pub model_library: Option<PathBuf>,

    /// How the supervisor starts the device process.
    #[arg(long, hide = true, value_name = "JSON")]
    pub device_process: Option<String>,
}

/// What is under the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kfd {
    /// The kernel's.
    Real,
    /// The model with this profile.
    Model(String),
}

impl std::str::FromStr for Kfd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "real" => Ok(Kfd::Real),
            Some(("model", profile)) if !profile.is_empty() => Ok(Kfd::Model(profile.to_owned())),
            _ => Err("expected `real` or `model:PROFILE`".to_owned()),
        }
    }
}

/// A size in bytes, with an optional suffix K, M, G or T (powers of 1024).
fn parse_size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (text.get(..at), 10),
        Some((at, 'M' | 'm')) => (text.get(..at), 20),
        Some((at, 'G' | 'g')) => (text.get(..at), 30),
        Some((at, 'T' | 't')) => (text.get(..at), 40),
        _ => (Some(text), 0),
    };
    let wrong = || format!("`{text}` is not a size: expected a number with an optional suffix K, M, G or T");
    let number: u64 = number.and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Compute units that a mask can name: the kernel drops those beyond.
const MAX_COMPUTE_UNITS: usize = virtio_kfd_protocol::limits::MAX_CU_MASK_WORDS * u32::BITS as usize;

/// `[GPU=]UNITS`, where UNITS is a list of numbers and ranges.
fn parse_cu_mask(text: &str) -> Result<CuMask, String> {
    let (gpu, units) = match text.split_once('=') {
        Some((gpu, units)) => (Some(gpu.to_owned()), units),
        None => (None, text),
    };
    let wrong = || {
        format!(
            "`{units}` are no compute units: expected numbers below {MAX_COMPUTE_UNITS} and ranges of them, as 0-31,40"
        )
    };
    let mut words = Vec::new();
    for part in units.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<usize>().ok().filter(|unit| *unit < MAX_COMPUTE_UNITS);
        let (first, last) =
            number(first).zip(number(last)).filter(|(first, last)| first <= last).ok_or_else(wrong)?;
        for unit in first..=last {
            let (word, bit) = (unit / 32, unit % 32);
            if words.len() <= word {
                words.resize(word.saturating_add(1), 0u32);
            }
            if let Some(word) = words.get_mut(word) {
                *word |= 1 << bit;
            }
        }
    }
    Ok(CuMask { gpu, words })
}

/// The guest's kernel has memory of the pool in whole granules.
fn parse_memory_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size < GRANULE => {
            let granule = GRANULE >> 20;
            Err(format!(
                "a guest takes {granule} MiB at a time: expected at least {granule}M, and found `{text}`"
            ))
        }
        size => Ok(size),
    }
}

fn parse_filter(text: &str) -> Result<String, String> {
    // A word alone is a target's name to the filter, which says nothing of all others then: a level that is misspelt.
    let is_level =
        |word: &str| word.is_empty() || word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    let mut words = text.split(',').map(str::trim);
    if let Some(word) = words.find(|word| !word.contains(['=', '[']) && !is_level(word)) {
        return Err(format!(
            "`{word}` is no level: expected error, warn, info, debug, trace or off, or TARGET=LEVEL"
        ));
    }
    match tracing_subscriber::EnvFilter::builder().parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{error}: expected a level, or TARGET=LEVEL, separated by commas")),
    }
}

fn parse_window(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if size.is_power_of_two() && size >= PAGE {
        Ok(size)
    } else {
        Err(format!("{size} is not a power of two of at least {PAGE}, which a PCI BAR has to be"))
    }
}

/// The answer to `--print-capabilities` (QEMU, docs/interop/vhost-user.json, `VHostUserBackendCapabilities`). The
/// features named there for a GPU are options for displays, which there are none of.
pub fn capabilities() -> String {
    serde_json::json!({ "type": "gpu", "features": [] }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("16g"), Ok(16 << 30));
        for wrong in ["", "G", "-1", "1.5G", "99999999T", "1KB", "é"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert!(parse_window("3G").is_err());
        assert_eq!(parse_window(DEFAULT_WINDOW_TEXT), Ok(crate::budget::DEFAULT_WINDOW));
        assert_eq!(parse_memory_size("2M"), Ok(GRANULE));
        for little in ["0", "1M", "2097151"] {
            assert!(parse_memory_size(little).unwrap_err().contains("at least 2M"), "{little}");
        }
    }

    #[test]
    fn compute_units() {
        let mask = |gpu: Option<&str>, words: &[u32]| {
            Ok(CuMask { gpu: gpu.map(str::to_owned), words: words.to_vec() })
        };
        assert_eq!(parse_cu_mask("0-31,33"), mask(None, &[u32::MAX, 2]));
        assert_eq!(parse_cu_mask("0000:03:00.0=4,2"), mask(Some("0000:03:00.0"), &[0x14]));
        assert_eq!(parse_cu_mask("gpu_id:7=1023").unwrap().words.len(), 32);
        for wrong in ["", "0=", "1024", "3-2", "0-", "-1", "0x3", "0-1,", "0=1=2"] {
            assert!(parse_cu_mask(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn log_filters() {
        assert!(parse_filter("warn,vhost_user_kfd=debug").is_ok());
        assert!(parse_filter("a=b=c,][").is_err());
        for right in ["off", "TRACE", "vhost_user_kfd::pool=trace", "[{ring}]=debug", "[work]"] {
            assert!(parse_filter(right).is_ok(), "{right}");
        }
        for wrong in ["inf0", "warning", "info,vhost_user_kfd", "inf0,vhost_user_kfd=debug"] {
            assert!(
                parse_filter(wrong).unwrap_err().contains("is no level: expected error, warn"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn command_line_forms() {
        use clap::CommandFactory;
        Args::command().debug_assert();
        let args =
            Args::parse_from(["x", "--socket", "s", "--kfd", "model:gfx906", "--gpu", "0", "--gpu", "1"]);
        assert_eq!(args.kfd, Kfd::Model("gfx906".into()));
        assert_eq!(args.gpus, ["0", "1"]);
        for wrong in
            [&["x", "--kfd", "model:"][..], &["x", "--kfd", "fake"], &["x", "--socket", "s", "--fd", "3"]]
        {
            assert!(Args::try_parse_from(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn capabilities_are_what_qemu_looks_for() {
        assert_eq!(capabilities(), r#"{"features":[],"type":"gpu"}"#);
    }
}
