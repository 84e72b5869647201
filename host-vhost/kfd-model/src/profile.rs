//! Topology profiles: which kernel and which GPUs the model plays, as data.
//!
//! A profile describes hardware (compute units, caches, memory, links, firmware versions) and the kernel
//! around it; what the kernel derives from hardware (capability bits, node counts, sibling maps, GPU ids) is
//! derived by [`crate::topology`] in the same way.

use std::path::Path;

use serde::Deserialize;

/// Environment variable that names the profile: one of the built-in names, or a path of a TOML file.
pub const PROFILE_VARIABLE: &str = "VIRTIO_KFD_MODEL";

/// KFD minor versions that the model can play. 9 is the oldest that current runtimes accept, 23 the newest known.
pub const KFD_MINORS: core::ops::RangeInclusive<u32> = 9..=23;

/// Most GPUs in one profile (the kernel's render minors end at 191, a board has at most 8).
pub const MAX_GPUS: usize = 16;

/// The built-in profiles, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("none", include_str!("../profiles/none.toml")),
    ("gfx900", include_str!("../profiles/gfx900.toml")),
    ("gfx906", include_str!("../profiles/gfx906.toml")),
    ("gfx906x2", include_str!("../profiles/gfx906x2.toml")),
    ("gfx906x2-pcie", include_str!("../profiles/gfx906x2-pcie.toml")),
    ("gfx90a", include_str!("../profiles/gfx90a.toml")),
    ("gfx942", include_str!("../profiles/gfx942.toml")),
    ("gfx1030", include_str!("../profiles/gfx1030.toml")),
    ("gfx1100", include_str!("../profiles/gfx1100.toml")),
];

/// Why a profile could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The environment variable is not set.
    #[error(
        "{PROFILE_VARIABLE} is not set: it names the profile of the KFD model ({known}) or a profile's file"
    )]
    NotChosen {
        /// Names of the built-in profiles.
        known: String,
    },
    /// Neither a built-in name nor a path.
    #[error(
        "no KFD model profile {found:?}: known are {known}; a path of a profile's file must contain a slash"
    )]
    Unknown {
        /// The name that was asked for.
        found: String,
        /// Names of the built-in profiles.
        known: String,
    },
    /// The file cannot be read.
    #[error("cannot read the KFD model profile {path}: {source}")]
    Unreadable {
        /// Path as given.
        path: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The text is not a profile.
    #[error("the KFD model profile {name} is not valid{}: {}", line_of(text, source), one_line(source.message()))]
    Syntax {
        /// Name or path.
        name: String,
        /// The text.
        text: String,
        /// Where and what.
        source: Box<toml::de::Error>,
    },
    /// The text is a profile, but it contradicts itself.
    #[error("the KFD model profile {name} is not consistent: {reason}")]
    Inconsistent {
        /// Name or path.
        name: String,
        /// What was found and what was expected.
        reason: String,
    },
}

/// In which line of the text it is, counted from 1, where that is known. Whoever shows the error has one line for it, and the
/// error as TOML's library writes it has several.
fn line_of(text: &str, error: &toml::de::Error) -> String {
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => format!(" in line {}", before.split('\n').count()),
        None => String::new(),
    }
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

/// A machine that the model plays.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// One line for people.
    pub description: String,
    /// The kernel.
    #[serde(default)]
    pub kernel: Kernel,
    /// The GPUs in probe order.
    #[serde(default)]
    pub gpu: Vec<Gpu>,
    /// Direct links between GPUs (those to the CPU are part of each GPU).
    #[serde(default)]
    pub link: Vec<PeerLink>,
}

/// The kernel around the driver.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Kernel {
    /// `KFD_IOCTL_MINOR_VERSION` (17 in Linux 6.12).
    pub kfd_minor: u32,
    /// amdgpu's DRM minor version (`KMS_DRIVER_MINOR`, 61 in Linux 6.12).
    pub drm_minor: i32,
    /// Built with `CONFIG_HSA_AMD_SVM` (Debian 12 and 13 are not).
    pub svm: bool,
    /// Built with `CONFIG_HSA_AMD_P2P` (Debian 12 and 13 are not).
    pub p2p: bool,
}

impl Default for Kernel {
    fn default() -> Self {
        Self { kfd_minor: 17, drm_minor: 61, svm: false, p2p: false }
    }
}

/// One GPU.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name in the topology: `amdgpu_asic_name` in lower case (`ip discovery` from gfx940 and gfx11 on).
    pub name: String,
    /// `gfx_target_version`: major * 10000 + minor * 100 + stepping.
    pub gfx_target_version: u32,
    /// IP version of the graphics core (GC), the kernel's `KFD_GC_VERSION`.
    pub gc_version: [u8; 3],
    /// `AMDGPU_FAMILY_*` of `amdgpu_drm.h`.
    pub family: u32,
    /// `adev->rev_id`.
    pub revision_id: u32,
    /// `adev->external_rev_id`.
    pub external_revision: u32,
    /// Board's serial number; 0 when the board has none.
    pub unique_id: u64,
    /// XGMI hive; 0 when it has none.
    #[serde(default)]
    pub hive_id: u64,
    /// Register `GB_ADDR_CONFIG`.
    pub gb_addr_config: u32,
    /// Hardware retries page faults by default (the kernel's `noretry` = 0).
    #[serde(default)]
    pub retry_faults: bool,
    /// XNACK can be chosen for each process (`KFD_SUPPORT_XNACK_PER_PROCESS`).
    #[serde(default)]
    pub xnack_per_process: bool,
    /// PCI function.
    pub pci: Pci,
    /// Compute units.
    pub shader: Shader,
    /// Memory.
    pub memory: Memory,
    /// Queues and copy engines.
    pub engines: Engines,
    /// Clocks.
    pub clocks: Clocks,
    /// Firmware.
    pub firmware: Firmware,
    /// Error correction.
    #[serde(default)]
    pub ras: Ras,
    /// Link to the CPU.
    pub cpu_link: CpuLink,
    /// Caches in the order of the kernel's table (`kfd_crat.c`).
    pub cache: Vec<Cache>,
}

/// The PCI function of a GPU.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Pci {
    /// `DDDD:BB:DD.F`.
    pub address: String,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Subsystem's vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem's device id.
    pub subsystem_device: u16,
}

/// A PCI address, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciAddress {
    /// Domain (segment).
    pub domain: u16,
    /// Bus.
    pub bus: u8,
    /// Device, 5 bits.
    pub device: u8,
    /// Function, 3 bits.
    pub function: u8,
}

impl PciAddress {
    /// Parses `DDDD:BB:DD.F`, all hexadecimal.
    pub fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let lengths = (domain.len(), bus.len(), device.len(), function.len());
        if lengths != (4, 2, 2, 1) {
            return None;
        }
        let parsed = Self {
            domain: u16::from_str_radix(domain, 16).ok()?,
            bus: u8::from_str_radix(bus, 16).ok()?,
            device: u8::from_str_radix(device, 16).ok()?,
            function: u8::from_str_radix(function, 16).ok()?,
        };
        (parsed.device < 32 && parsed.function < 8).then_some(parsed)
    }

    /// `devfn`: device and function in one byte.
    pub fn devfn(self) -> u8 {
        (self.device << 3) | self.function
    }

    /// The kernel's `pci_dev_id`: bus and devfn.
    pub fn location_id(self) -> u32 {
        (u32::from(self.bus) << 8) | u32::from(self.devfn())
    }
}

impl core::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// The compute units of a GPU.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Shader {
    /// Accelerated compute dies (XCC) that form this one node.
    #[serde(default = "one")]
    pub xccs: u32,
    /// Shader engines of one XCC.
    pub engines: u32,
    /// Shader arrays of one engine.
    pub arrays_per_engine: u32,
    /// Compute units of one array, present or not.
    pub cus_per_array: u32,
    /// Working compute units: one mask for each array of one XCC, engine by engine; the same in each XCC.
    pub cu_bitmap: Vec<u32>,
    /// SIMDs of one compute unit.
    pub simds_per_cu: u32,
    /// Waves that one SIMD holds.
    pub max_waves_per_simd: u32,
    /// Lanes of a wave.
    pub wave_front_size: u32,
    /// Local data share of one compute unit in KiB.
    pub lds_kib: u32,
    /// Scratch slots of one compute unit.
    pub scratch_slots_per_cu: u32,
    /// Barriers of the global wave sync, 0 when not usable.
    pub gws: u32,
}

fn one() -> u32 {
    1
}

impl Shader {
    /// Arrays of one XCC.
    pub fn arrays(&self) -> u32 {
        self.engines.saturating_mul(self.arrays_per_engine)
    }

    /// Working compute units of all XCCs.
    pub fn active_cus(&self) -> u32 {
        let one: u32 = self.cu_bitmap.iter().map(|mask| mask.count_ones()).sum();
        one.saturating_mul(self.xccs)
    }
}

/// The memory of a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// VRAM in MiB.
    pub vram_mib: u64,
    /// The part that the CPU reaches through the BAR, in MiB; all of it is a "large BAR".
    pub visible_mib: u64,
    /// Width of the interface in bits.
    pub width: u32,
    /// Clock in MHz.
    pub clock_mhz: u32,
    /// `AMDGPU_VRAM_TYPE_*`.
    pub vram_type: u32,
}

impl Memory {
    /// VRAM in bytes.
    pub fn vram_bytes(&self) -> u64 {
        self.vram_mib.saturating_mul(1 << 20)
    }

    /// CPU-visible VRAM in bytes.
    pub fn visible_bytes(&self) -> u64 {
        self.visible_mib.saturating_mul(1 << 20)
    }

    /// The whole VRAM is visible (`kfd_dev_is_large_bar`).
    pub fn large_bar(&self) -> bool {
        self.visible_mib == self.vram_mib
    }
}

/// Copy engines and queues of a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Engines {
    /// SDMA engines for PCIe.
    pub sdma: u32,
    /// SDMA engines for XGMI.
    pub sdma_xgmi: u32,
    /// Queues of one SDMA engine that user space can have.
    pub sdma_queues_per_engine: u32,
    /// Compute queues.
    pub cp_queues: u32,
}

/// Clocks of a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    /// Highest shader clock in MHz.
    pub max_engine_mhz: u32,
    /// Reference clock that the GPU's time stamps count, in kHz.
    pub counter_khz: u32,
}

/// Firmware versions of a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Firmware {
    /// Compute micro engine (MEC).
    pub mec: u32,
    /// SDMA.
    pub sdma: u32,
    /// Micro engine scheduler (`mes.sched_version`), 0 before gfx11.
    #[serde(default)]
    pub mes: u32,
}

/// Error correction that is switched on.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Ras {
    /// SRAM of the graphics core.
    pub gfx: bool,
    /// Memory controller.
    pub umc: bool,
}

/// The link from a GPU to its CPU node.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct CpuLink {
    /// What kind.
    pub kind: LinkKind,
    /// Lowest bandwidth in MB/s.
    pub min_bandwidth: u32,
    /// Highest bandwidth in MB/s.
    pub max_bandwidth: u32,
    /// PCIe atomics work from the GPU to memory.
    #[serde(default)]
    pub atomics: bool,
}

/// Kinds of links.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// PCI Express.
    Pcie,
    /// AMD's XGMI.
    Xgmi,
}

/// An XGMI link between two GPUs, both directions.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PeerLink {
    /// Indices of the two GPUs in the profile.
    pub gpus: [usize; 2],
    /// XGMI hops.
    pub hops: u32,
    /// Lowest bandwidth in MB/s.
    pub min_bandwidth: u32,
    /// Highest bandwidth in MB/s.
    pub max_bandwidth: u32,
}

/// One kind of cache.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Level: 1, 2 or 3.
    pub level: u32,
    /// What it holds.
    pub kind: CacheKind,
    /// Size in KiB.
    pub size_kib: u32,
    /// Line in bytes.
    pub line: u32,
    /// Compute units that share one.
    pub cus_shared: u32,
}

/// What a cache holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Data.
    Data,
    /// Instructions.
    Instruction,
}

impl Profile {
    /// Names of the built-in profiles.
    pub fn known() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    fn known_list() -> String {
        Self::known().collect::<Vec<_>>().join(", ")
    }

    /// The profile that [`PROFILE_VARIABLE`] names.
    ///
    /// # Errors
    /// See [`ProfileError`].
    pub fn from_environment() -> Result<Self, ProfileError> {
        match std::env::var_os(PROFILE_VARIABLE) {
            None => Err(ProfileError::NotChosen { known: Self::known_list() }),
            Some(value) => Self::load(&value.to_string_lossy()),
        }
    }

    /// Loads a profile by its built-in name or, when `name_or_path` has a slash, from a file.
    ///
    /// # Errors
    /// See [`ProfileError`].
    pub fn load(name_or_path: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
            return Self::parse(name, text);
        }
        if !name_or_path.contains('/') {
            return Err(ProfileError::Unknown { found: name_or_path.to_owned(), known: Self::known_list() });
        }
        let text = std::fs::read_to_string(Path::new(name_or_path))
            .map_err(|source| ProfileError::Unreadable { path: name_or_path.to_owned(), source })?;
        Self::parse(name_or_path, &text)
    }

    /// Parses a profile's text; `name` stands in messages.
    ///
    /// # Errors
    /// [`ProfileError::Syntax`] or [`ProfileError::Inconsistent`].
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text).map_err(|source| ProfileError::Syntax {
            name: name.to_owned(),
            text: text.to_owned(),
            source: Box::new(source),
        })?;
        match profile.check() {
            Ok(()) => Ok(profile),
            Err(reason) => Err(ProfileError::Inconsistent { name: name.to_owned(), reason }),
        }
    }

    fn check(&self) -> Result<(), String> {
        if !KFD_MINORS.contains(&self.kernel.kfd_minor) {
            return Err(format!(
                "kernel.kfd_minor is {}, expected {} to {}",
                self.kernel.kfd_minor,
                KFD_MINORS.start(),
                KFD_MINORS.end()
            ));
        }
        if self.gpu.len() > MAX_GPUS {
            return Err(format!("{} GPUs, at most {MAX_GPUS} are possible", self.gpu.len()));
        }
        let mut seen = Vec::new();
        for (index, gpu) in self.gpu.iter().enumerate() {
            gpu.check().map_err(|reason| format!("gpu {index} ({}): {reason}", gpu.name))?;
            if seen.contains(&&gpu.pci.address) {
                return Err(format!("two GPUs at PCI address {}", gpu.pci.address));
            }
            seen.push(&gpu.pci.address);
        }
        for link in &self.link {
            let [first, second] = link.gpus;
            let (Some(a), Some(b)) = (self.gpu.get(first), self.gpu.get(second)) else {
                return Err(format!(
                    "link between {first} and {second}, but there are {} GPUs",
                    self.gpu.len()
                ));
            };
            if first == second {
                return Err(format!("link from GPU {first} to itself"));
            }
            if a.hive_id == 0 || a.hive_id != b.hive_id {
                return Err(format!("XGMI link between GPUs {first} and {second}, which share no hive_id"));
            }
        }
        for (first, a) in self.gpu.iter().enumerate().filter(|(_, gpu)| gpu.hive_id != 0) {
            for (second, _) in
                self.gpu.iter().enumerate().skip(first + 1).filter(|(_, b)| b.hive_id == a.hive_id)
            {
                if !self.link.iter().any(|link| [[first, second], [second, first]].contains(&link.gpus)) {
                    return Err(format!(
                        "GPUs {first} and {second} share a hive_id, but no [[link]] joins them"
                    ));
                }
            }
        }
        Ok(())
    }
}

impl Gpu {
    /// The PCI address.
    pub fn address(&self) -> PciAddress {
        // Every way to a `Profile` goes through `check`, which parsed it.
        PciAddress::parse(&self.pci.address).unwrap_or(PciAddress {
            domain: 0,
            bus: 0,
            device: 0,
            function: 0,
        })
    }

    fn check(&self) -> Result<(), String> {
        if PciAddress::parse(&self.pci.address).is_none() {
            return Err(format!("pci.address is {:?}, expected the form 0000:c3:00.0", self.pci.address));
        }
        let shader = &self.shader;
        let arrays = shader.arrays();
        if u32::try_from(shader.cu_bitmap.len()) != Ok(arrays) {
            return Err(format!(
                "shader.cu_bitmap has {} masks, expected {arrays} (engines * arrays_per_engine)",
                shader.cu_bitmap.len()
            ));
        }
        if shader.cus_per_array == 0 || shader.cus_per_array > 32 {
            return Err(format!("shader.cus_per_array is {}, expected 1 to 32", shader.cus_per_array));
        }
        let present = u32::MAX >> (32 - shader.cus_per_array);
        if let Some(mask) = shader.cu_bitmap.iter().find(|mask| **mask & !present != 0) {
            return Err(format!("shader.cu_bitmap {mask:#x} has more than {} units", shader.cus_per_array));
        }
        // The kernel's sibling map holds 32 arrays (CACHE_SIBLINGMAP_SIZE is 128 bytes); it reports XCC for XCC.
        if arrays == 0 || arrays.saturating_mul(shader.xccs) > 32 || shader.xccs == 0 {
            return Err(format!("{arrays} arrays in {} XCCs, expected 1 to 32 in all", shader.xccs));
        }
        if shader.active_cus() == 0 || shader.simds_per_cu == 0 {
            return Err("no compute unit works".to_owned());
        }
        if shader.lds_kib == 0 {
            return Err(
                "shader.lds_kib is 0, expected the KiB of one compute unit's local data share".to_owned()
            );
        }
        if self.cache.iter().any(|cache| cache.cus_shared == 0 || cache.cus_shared > 31) {
            return Err("cache.cus_shared must be 1 to 31".to_owned());
        }
        let memory = &self.memory;
        if memory.vram_mib == 0 || memory.visible_mib == 0 || memory.visible_mib > memory.vram_mib {
            return Err(format!(
                "memory.visible_mib is {}, expected 1 to vram_mib ({})",
                memory.visible_mib, memory.vram_mib
            ));
        }
        if memory.vram_mib > 1 << 20 {
            return Err(format!("memory.vram_mib is {}, at most 1 TiB is possible", memory.vram_mib));
        }
        if self.clocks.counter_khz == 0 {
            return Err("clocks.counter_khz is 0".to_owned());
        }
        if self.name.len() > 31 || !self.name.is_ascii() {
            return Err("name must be ASCII and at most 31 bytes long".to_owned());
        }
        Ok(())
    }
}
