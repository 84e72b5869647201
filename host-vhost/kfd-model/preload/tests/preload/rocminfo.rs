//! Debian's unmodified rocminfo, thunk and runtime on the model, with `LD_PRELOAD` alone.
//!
//! The programs come from a directory into which the suite's packages `rocminfo`, `libhsa-runtime64-1`,
//! `libhsakmt1`, `libdrm-amdgpu1` and all that they depend on were unpacked (`dpkg -x`), glibc among them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::run;

/// Where the unpacked packages of each suite are.
const TRIXIE: &str = "VIRTIO_KFD_ROCM_TRIXIE";
const BOOKWORM: &str = "VIRTIO_KFD_ROCM_BOOKWORM";

/// The command that runs rocminfo of the suite in `variable`; `None`, with the reason printed, when it is not set.
fn rocminfo(variable: &str) -> Option<Command> {
    let Some(root) = std::env::var_os(variable).map(PathBuf::from) else {
        println!("skipped: {variable} is not set: it names a directory with the suite's rocminfo unpacked");
        return None;
    };
    // A suite's programs run with that suite's loader and libraries, whatever the machine has.
    let loader = [
        "usr/lib64/ld-linux-x86-64.so.2",
        "lib64/ld-linux-x86-64.so.2",
        "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    ]
    .map(|path| root.join(path))
    .into_iter()
    .find(|path| is_file(path))
    .unwrap_or_else(|| panic!("{}: no loader in {}", variable, root.display()));
    let libraries: Vec<_> = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"]
        .map(|path| root.join(path).into_os_string())
        .into();
    let mut command = Command::new(loader);
    command
        .arg("--library-path")
        .arg(libraries.join(std::ffi::OsStr::new(":")))
        .arg(root.join("usr/bin/rocminfo"));
    Some(command)
}

/// What ROCr 5.2.3 says of a kernel without CONFIG_HSA_AMD_SVM, which Debian's is and the profile's by that: there
/// `AMDKFD_IOC_SET_XNACK_MODE` is EPERM.
const NO_XNACK_QUERY: &str = "KFD does not support xnack mode query.\nROCr must assume xnack is disabled.\n";

/// What the suite's rocminfo prints on a profile; `None` when there is none.
fn output(variable: &str, profile: &str) -> Option<String> {
    let output = run(profile, &mut rocminfo(variable)?);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{variable} {profile}: {}\n{text}\n{errors}", output.status);
    let expected = if variable == BOOKWORM { NO_XNACK_QUERY } else { "" };
    assert_eq!(errors, expected, "{variable} {profile}");
    assert!(text.contains("ROCk module is loaded"), "{text}");
    assert!(text.trim_end().ends_with("*** Done ***"), "{text}");
    Some(text)
}

/// A file, and not a link that leads out of the directory to the machine's own.
fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_file())
        || path.read_link().is_ok_and(|target| target.is_relative() && path.is_file())
}

/// `key: value` lines of the agents, one list per agent.
fn agents(text: &str) -> Vec<Vec<(&str, &str)>> {
    let mut agents: Vec<Vec<(&str, &str)>> = Vec::new();
    for line in text.lines() {
        if line.starts_with("Agent ") {
            agents.push(Vec::new());
        } else if let (Some(agent), Some((key, value))) = (agents.last_mut(), line.split_once(':')) {
            agent.push((key.trim(), value.trim()));
        }
    }
    agents
}

/// The first value of `key`.
fn value<'text>(agent: &[(&'text str, &'text str)], key: &str) -> Option<&'text str> {
    agent.iter().find(|(known, _)| *known == key).map(|(_, value)| *value)
}

/// What both suites say of the profile gfx906, a Radeon Instinct MI50 with 16 GB: PCI device 1002:66a1 at 0000:c3:00.0
/// (the BDFID is bus << 8), 60 compute units of 4 SIMDs, wave64, 10 waves per SIMD, 16368 MiB.
const MI50: &[(&str, &str)] = &[
    ("Name", "gfx906"),
    ("Uuid", "GPU-1d2c6a9e40b80906"),
    ("Vendor Name", "AMD"),
    ("Feature", "KERNEL_DISPATCH"),
    ("Device Type", "GPU"),
    ("Node", "1"),
    ("L1", "16(0x10) KB"),
    ("L2", "8192(0x2000) KB"),
    ("Chip ID", "26273(0x66a1)"),
    ("Cacheline Size", "64(0x40)"),
    ("Max Clock Freq. (MHz)", "1725"),
    ("BDFID", "49920"),
    ("Compute Unit", "60"),
    ("SIMDs per CU", "4"),
    ("Shader Engines", "4"),
    ("Wavefront Size", "64(0x40)"),
    ("Max Waves Per CU", "40(0x28)"),
    ("Size", "16760832(0xffc000) KB"),
];

/// The suite's rocminfo lists the CPU and the GPU of profile gfx906.
fn lists_an_mi50(variable: &str) {
    let Some(text) = output(variable, "gfx906") else { return };
    let agents = agents(&text);
    let [cpu, gpu] = agents.as_slice() else { panic!("{text}") };
    assert_eq!(value(cpu, "Device Type"), Some("CPU"), "{text}");
    for (key, expected) in MI50 {
        assert_eq!(value(gpu, key), Some(*expected), "{key}\n{text}");
    }
    let isa = gpu
        .iter()
        .rev()
        .find(|(key, value)| *key == "Name" && value.starts_with("amdgcn"))
        .map(|(_, value)| value);
    assert!(isa.is_some_and(|isa| isa.starts_with("amdgcn-amd-amdhsa--gfx906")), "{text}");
}

#[test]
fn bookworm_lists_the_gpu() {
    lists_an_mi50(BOOKWORM);
}

#[test]
fn trixie_lists_the_gpu() {
    lists_an_mi50(TRIXIE);
}

/// The device types that the suite's rocminfo lists on a profile.
fn device_types(variable: &str, profile: &str) -> Option<Vec<String>> {
    let text = output(variable, profile)?;
    let agents = agents(&text);
    Some(agents.iter().map(|agent| value(agent, "Device Type").unwrap_or_default().to_owned()).collect())
}

#[test]
fn two_gpus_are_two_agents() {
    for variable in [BOOKWORM, TRIXIE] {
        for profile in ["gfx906x2", "gfx906x2-pcie"] {
            if let Some(types) = device_types(variable, profile) {
                assert_eq!(types, ["CPU", "GPU", "GPU"], "{variable} {profile}");
            }
        }
    }
}

#[test]
fn without_a_gpu_the_cpu_is_the_only_agent() {
    for variable in [BOOKWORM, TRIXIE] {
        if let Some(types) = device_types(variable, "none") {
            assert_eq!(types, ["CPU"], "{variable}");
        }
    }
}

/// The KFD requests of a start in the order of their first use, as the front end's trace tells them.
fn first_requests(variable: &str) -> Option<Vec<u8>> {
    let mut command = rocminfo(variable)?;
    let output = run("gfx906", command.env("VIRTIO_KFD_SEAM_TRACE", "1"));
    let mut requests = Vec::new();
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        if let Some((_, request)) = line.split_once(" 'K' 0x") {
            let number = u8::from_str_radix(request.split(' ').next().unwrap_or_default(), 16).unwrap();
            if !requests.contains(&number) {
                requests.push(number);
            }
        }
    }
    Some(requests)
}

/// The order that was recorded of libhsakmt 5.2.3 and ROCr 5.2.3: version, apertures, VM, memory policy, the HDP
/// flush page, the debugger's old request (0x82), XNACK mode, clock counters, event page and events, scratch, trap
/// handler; then the way down.
#[test]
fn bookworm_starts_in_the_recorded_order() {
    if let Some(requests) = first_requests(BOOKWORM) {
        let recorded = [0x01, 0x14, 0x15, 0x04, 0x16, 0x18, 0x82, 0x21, 0x05, 0x08, 0x11, 0x13];
        assert_eq!(requests.get(..recorded.len()), Some(&recorded[..]), "{requests:x?}");
    }
}
