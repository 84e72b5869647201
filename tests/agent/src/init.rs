//! Process 1 of a test guest: mounts, modules, the agent, reaping.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use rustix::mount::MountFlags;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions};
use rustix::system::RebootCommand;

use crate::wire::Hello;

/// Lists the image's modules, one in a line: name, file below [`MODULE_DIRECTORY`], names that must be loaded before.
pub const MODULE_LIST: &str = "modules.list";

/// Where the image keeps its modules.
pub const MODULE_DIRECTORY: &str = "/lib/virtio-kfd";

/// The kernel parameter that names the modules to load, separated by commas.
pub const MODULE_PARAMETER: &str = "kfd.modules=";

/// Environment variable that carries module errors from process 1 to the agent, one in a line.
const ERRORS_VARIABLE: &str = "KFD_AGENT_MODULE_ERRORS";

/// Brings the guest up, runs the agent as a child, reaps orphans, and powers off when the agent ends.
pub fn run() {
    if let Err(error) = mount_all() {
        eprintln!("kfd-agent: mount: {error}");
    }
    // What systemd gives to services: few by default, many for who asks.
    let files = Rlimit { current: Some(1024), maximum: Some(524_288) };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, files) {
        eprintln!("kfd-agent: RLIMIT_NOFILE: {error}");
    }
    let errors = load_modules();
    for error in &errors {
        eprintln!("kfd-agent: {error}");
    }
    println!("kfd-agent: guest is up after {} ms", uptime_ms());
    let child = Command::new("/proc/self/exe")
        .arg("serve")
        .env("PATH", "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin")
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8")
        .env(ERRORS_VARIABLE, errors.join("\n"))
        .spawn();
    match child {
        Ok(child) => reap_until(Pid::from_child(&child)),
        Err(error) => eprintln!("kfd-agent: start the agent: {error}"),
    }
    println!("kfd-agent: powering off");
    if let Err(error) = rustix::system::reboot(RebootCommand::PowerOff) {
        eprintln!("kfd-agent: power off: {error}");
    }
}

/// What the agent says when it begins to serve.
pub fn hello() -> Hello {
    let errors = std::env::var(ERRORS_VARIABLE).unwrap_or_default();
    Hello {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        uptime_ms: uptime_ms(),
        module_errors: errors.lines().map(str::to_owned).collect(),
    }
}

fn mount_all() -> io::Result<()> {
    let plain = MountFlags::NOSUID;
    let system = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    for (kind, place, flags) in [
        ("devtmpfs", "/dev", plain | MountFlags::NOEXEC),
        ("proc", "/proc", system),
        ("sysfs", "/sys", system),
        ("tmpfs", "/run", plain),
        ("tmpfs", "/tmp", plain),
        ("tmpfs", "/dev/shm", plain),
        ("devpts", "/dev/pts", plain | MountFlags::NOEXEC),
    ] {
        fs::create_dir_all(place)?;
        match rustix::mount::mount(kind, place, kind, flags, None) {
            // The kernel may have mounted /dev itself.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(io::Error::other(format!("{kind} on {place}: {error}"))),
        }
    }
    for (name, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        symlink(target, Path::new("/dev").join(name))?;
    }
    Ok(())
}

/// A module of the image.
#[derive(Debug, PartialEq, Eq)]
struct Module {
    file: String,
    needs: Vec<String>,
}

fn parse_list(text: &str) -> BTreeMap<String, Module> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().map(str::to_owned);
            Some((words.next()?, Module { file: words.next()?, needs: words.collect() }))
        })
        .collect()
}

/// The modules to load for `wanted`, each after the ones that it needs.
fn load_order<'a>(modules: &'a BTreeMap<String, Module>, wanted: &[&'a str]) -> Vec<&'a str> {
    fn visit<'a>(
        modules: &'a BTreeMap<String, Module>,
        name: &'a str,
        seen: &mut Vec<&'a str>,
        order: &mut Vec<&'a str>,
    ) {
        if seen.contains(&name) {
            return;
        }
        seen.push(name);
        for need in modules.get(name).map(|module| module.needs.as_slice()).unwrap_or_default() {
            visit(modules, need, seen, order);
        }
        order.push(name);
    }
    let (mut seen, mut order) = (Vec::new(), Vec::new());
    for name in wanted {
        visit(modules, name, &mut seen, &mut order);
    }
    order
}

/// Loads what the kernel command line asks for; returns what failed.
fn load_modules() -> Vec<String> {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let wanted: Vec<&str> = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix(MODULE_PARAMETER))
        .map(|names| names.split(',').filter(|name| !name.is_empty()).collect())
        .unwrap_or_default();
    let text = fs::read_to_string(Path::new(MODULE_DIRECTORY).join(MODULE_LIST)).unwrap_or_default();
    let modules = parse_list(&text);
    let mut errors = Vec::new();
    for name in load_order(&modules, &wanted) {
        let Some(module) = modules.get(name) else {
            if !Path::new("/sys/module").join(name).exists() {
                errors.push(format!("module {name}: not in the image and not in the kernel"));
            }
            continue;
        };
        let loaded = File::open(Path::new(MODULE_DIRECTORY).join(&module.file))
            .and_then(|file| rustix::system::finit_module(file, c"", 0).map_err(io::Error::from));
        if let Err(error) = loaded
            && error.raw_os_error() != Some(rustix::io::Errno::EXIST.raw_os_error())
        {
            errors.push(format!("module {name}: {error}"));
        }
    }
    errors
}

fn reap_until(agent: Pid) {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == agent => {
                eprintln!("kfd-agent: the agent ended: {status:?}");
                return;
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                eprintln!("kfd-agent: wait: {error}");
                return;
            }
        }
    }
}

fn uptime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_load_after_what_they_need() {
        let modules =
            parse_list("virtio_gpu virtio-gpu.ko drm_kms_helper drm\ndrm drm.ko\ndrm_kms_helper k.ko drm\n");
        assert_eq!(
            load_order(&modules, &["virtio_gpu", "builtin", "drm"]),
            ["drm", "drm_kms_helper", "virtio_gpu", "builtin"]
        );
    }
}
