//! A daemon with workers on the KFD model, for tests of the library through loop-back.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The directory with the programs, or why there is none: `VIRTIO_KFD_BIN_DIR`, or where the tests were built.
fn programs() -> Result<PathBuf, String> {
    let complete = |directory: &Path| {
        ["vhost-user-kfd", "kfd-worker", "libkfd_model_preload.so"]
            .iter()
            .all(|name| directory.join(name).exists())
    };
    if let Some(directory) = std::env::var_os("VIRTIO_KFD_BIN_DIR").map(PathBuf::from) {
        assert!(complete(&directory), "VIRTIO_KFD_BIN_DIR={} lacks programs", directory.display());
        return Ok(directory);
    }
    let own = std::env::current_exe().unwrap();
    let profile = own.ancestors().nth(2).unwrap();
    let target = profile.parent().unwrap();
    [profile.to_owned(), target.join("release"), target.join("debug")]
        .into_iter()
        .find(|directory| complete(directory))
        .ok_or_else(|| "vhost-user-kfd, kfd-worker and kfd-model-preload are not built".to_owned())
}

/// A daemon that ends with the test.
pub struct Daemon {
    /// Its supervisor.
    pub child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    /// Starts one; none where the programs are not built.
    #[allow(dead_code, reason = "not all tests need it")]
    pub fn start() -> Option<Daemon> {
        Daemon::start_with(&[])
    }

    /// The same with more arguments.
    #[allow(dead_code, reason = "not all tests need it")]
    pub fn start_with(arguments: &[&str]) -> Option<Daemon> {
        let programs = match programs() {
            Ok(programs) => programs,
            Err(why) => {
                println!("SKIP: {why}");
                return None;
            }
        };
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(programs.join("vhost-user-kfd"))
            .arg("--socket")
            .arg(directory.path().join("socket"))
            .args(["--kfd", "model:gfx906", "--shmem-size", "256M"])
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        // Shown by the test runner where the test fails.
        std::thread::spawn(move || {
            log.lines().map_while(Result::ok).for_each(|line| println!("daemon: {line}"))
        });
        let daemon = Daemon { child, directory };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !daemon.socket().exists() {
            assert!(Instant::now() < deadline, "the daemon made no socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(daemon)
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It is a child of this process, so that its id cannot be another's.
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}
