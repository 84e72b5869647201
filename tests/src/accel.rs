//! Whether guests run on KVM or on QEMU's own emulation.
//!
//! A machine may have `/dev/kvm` and yet not boot a stock kernel on it (nested virtualisation). So KVM is used only
//! after a kernel has booted on it; the answer is kept until the machine's next boot.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use virtio_kfd_images::Cache;

use crate::process::Keeper;
use crate::qemu::Qemu;

/// Chooses the accelerator without a probe: `kvm` or `tcg`.
pub const ACCEL_VARIABLE: &str = "VIRTIO_KFD_ACCEL";

/// How long the probe's kernel may take; one on KVM needs about a second.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// What executes a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// The host's processor.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Accel {
    /// QEMU's options for it.
    pub fn arguments(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // Every CPU that GPUs of today are in has rdtscp, and programs that measure time use it.
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "qemu64,+rdtscp"],
        }
    }

    /// What [`ACCEL_VARIABLE`] asks for, if anything.
    ///
    /// # Errors
    /// Another value of it than `kvm` and `tcg`.
    pub fn asked() -> Result<Option<Self>> {
        match std::env::var_os(ACCEL_VARIABLE) {
            Some(value) => Self::parse(&value.to_string_lossy()),
            None => Ok(None),
        }
    }

    fn parse(value: &str) -> Result<Option<Self>> {
        match value {
            "" => Ok(None),
            "kvm" => Ok(Some(Self::Kvm)),
            "tcg" => Ok(Some(Self::Tcg)),
            other => bail!("{ACCEL_VARIABLE}={other}: expected kvm or tcg"),
        }
    }

    /// The accelerator that works on this machine.
    ///
    /// # Errors
    /// An unknown value of [`ACCEL_VARIABLE`], or a cache or QEMU that cannot be used.
    pub fn choose(cache: &Cache, qemu: &Qemu, kernel: &Path) -> Result<Self> {
        if let Some(asked) = Self::asked()? {
            return Ok(asked);
        }
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Self::Tcg);
        }
        let boot =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("boot id of this machine")?;
        let answer = cache.path(format!("kvm/{}", boot.trim()))?;
        if let Ok(known) = std::fs::read_to_string(&answer) {
            return Ok(if known == "yes" { Self::Kvm } else { Self::Tcg });
        }
        let boots = probe(qemu, kernel)?;
        cache.write_whole(&answer, if boots { b"yes" } else { b"no" })?;
        Ok(if boots { Self::Kvm } else { Self::Tcg })
    }
}

/// Boots a kernel without a root file system on KVM: it works if the kernel comes as far as missing it.
fn probe(qemu: &Qemu, kernel: &Path) -> Result<bool> {
    let directory = tempfile::tempdir().context("temporary directory")?;
    let console = directory.path().join("console");
    let mut command = qemu.command();
    command.args(["-M", "q35", "-m", "256", "-accel", "kvm", "-cpu", "host", "-kernel"]).arg(kernel);
    command.args(["-append", "console=ttyS0 panic=-1", "-serial"]).arg(format!("file:{}", console.display()));
    let keeper = Keeper::start(command, &directory.path().join("qemu.log"), PROBE_LIMIT)?;
    keeper.wait();
    let text = std::fs::read(&console).unwrap_or_default();
    Ok(String::from_utf8_lossy(&text).contains("Unable to mount root fs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_asked_for() {
        assert_eq!(Accel::parse("kvm").unwrap(), Some(Accel::Kvm));
        assert_eq!(Accel::parse("tcg").unwrap(), Some(Accel::Tcg));
        assert_eq!(Accel::parse("").unwrap(), None);
        let wrong = Accel::parse("kvmm").unwrap_err().to_string();
        assert_eq!(wrong, "VIRTIO_KFD_ACCEL=kvmm: expected kvm or tcg");
    }
}
