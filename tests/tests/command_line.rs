//! What an operator gets wrong: one clear sentence, a status that is not zero, and nothing left behind.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vhost::VhostBackend;
use vhost::vhost_user::Frontend;
use virtio_kfd_tests::native::{run, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, Keeper, need};

const LIMIT: Duration = Duration::from_secs(60);

struct Place {
    directory: tempfile::TempDir,
    program: PathBuf,
}

impl Place {
    fn new(program: PathBuf) -> Self {
        Self { directory: tempfile::tempdir().unwrap(), program }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("gpu")
    }

    /// Runs the daemon, which must refuse; gives the sentence that it ends with.
    #[track_caller]
    fn refused(&self, program: &Path, arguments: &[&str]) -> String {
        // A mark in the environment, by which whatever it leaves running is found.
        let mark = format!("VIRTIO_KFD_TEST_MARK={}", self.directory.path().display());
        let (name, value) = mark.split_once('=').unwrap();
        let mut command = Command::new(program);
        command.args(arguments).env(name, value);
        let output = run(command, LIMIT).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_ne!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{arguments:?} on standard output: {output:?}");
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(lines.len(), 1, "{arguments:?}: one line:\n{stderr}");
        let sentence = lines[0].strip_prefix("vhost-user-kfd: ");
        let sentence =
            sentence.unwrap_or_else(|| panic!("{arguments:?}: who says that? {stderr}")).to_owned();
        assert!(!self.socket().exists(), "{arguments:?} left its socket");
        let left: Vec<String> = marked(&mark);
        assert!(left.is_empty(), "{arguments:?} left processes: {left:?}");
        sentence
    }

    fn refuses(&self, kfd: &[&str], more: &[&str]) -> String {
        let socket = self.socket();
        let mut arguments = vec!["--socket", socket.to_str().unwrap()];
        arguments.extend(kfd);
        arguments.extend(more);
        self.refused(&self.program, &arguments)
    }
}

/// Command lines of processes that have this in their environment.
fn marked(mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        if read("environ").split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            found.push(String::from_utf8_lossy(&read("cmdline")).replace('\0', " "));
        }
    }
    found
}

#[track_caller]
fn says(sentence: &str, words: &[&str]) {
    for word in words {
        assert!(sentence.contains(word), "{word:?} is not in: {sentence}");
    }
}

fn place() -> anyhow::Result<Place> {
    let artifacts = Artifacts::find()?;
    artifacts.program("kfd-worker")?;
    artifacts.program("libkfd_model_preload.so")?;
    Ok(Place::new(artifacts.program("vhost-user-kfd")?))
}

const MODEL: &[&str] = &["--kfd", "model:gfx906"];

/// The options in a text: what begins with two hyphens, up to what is no part of a name.
fn options(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("--") {
        let is_part = |letter: &char| letter.is_ascii_lowercase() || *letter == '-';
        let option: String = text[at..].chars().take_while(is_part).collect();
        if option.len() > 2 && !text[..at].ends_with('-') {
            found.insert(option);
        }
    }
    found
}

/// What `--help` lists stands in the table of docs/operating.md, and nothing else does.
#[test]
fn every_option_is_documented() {
    let place = need!(place());
    let mut command = Command::new(&place.program);
    command.arg("--help");
    let help = text(command, LIMIT).unwrap();
    let listed = help.lines().map(str::trim).filter(|line| line.starts_with('-'));
    let mut known: BTreeSet<String> =
        listed.filter_map(|line| options(line.split(" <").next().unwrap()).into_iter().next()).collect();
    assert!(known.len() > 10, "{help}");
    assert!(known.remove("--help") && known.remove("--version"), "{help}");
    let page = std::fs::read_to_string(package_path("../docs/operating.md")).unwrap();
    let (_, page) = page.split_once("\n## Options of `vhost-user-kfd`\n").unwrap();
    let (table, _) = page.split_once("\n## ").unwrap();
    let cells = table.lines().filter_map(|line| line.strip_prefix("| `--").map(|rest| format!("--{rest}")));
    let documented: BTreeSet<String> =
        cells.flat_map(|row| options(row.split(" | ").next().unwrap())).collect();
    assert_eq!(known, documented);
}

#[test]
fn a_directory_that_does_not_exist() {
    let place = need!(place());
    let socket = place.directory.path().join("missing/gpu");
    let sentence =
        place.refused(&place.program, &["--socket", socket.to_str().unwrap(), "--kfd", "model:gfx906"]);
    says(&sentence, &[socket.to_str().unwrap()]);
}

#[test]
fn a_socket_that_something_else_has() {
    let place = need!(place());
    let file = place.directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let sentence =
        place.refused(&place.program, &["--socket", file.to_str().unwrap(), "--kfd", "model:gfx906"]);
    says(&sentence, &[file.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    let used = place.directory.path().join("used");
    let _listener = std::os::unix::net::UnixListener::bind(&used).unwrap();
    let sentence =
        place.refused(&place.program, &["--socket", used.to_str().unwrap(), "--kfd", "model:gfx906"]);
    says(&sentence, &[used.to_str().unwrap()]);
}

#[test]
fn a_machine_without_kfd() {
    let place = need!(place());
    if Path::new("/dev/kfd").exists() {
        println!("SKIP: this machine has a /dev/kfd");
        return;
    }
    says(&place.refuses(&["--kfd", "real"], &[]), &["/dev/kfd"]);
}

#[test]
fn a_profile_that_does_not_exist() {
    let place = need!(place());
    says(&place.refuses(&["--kfd", "model:gfx000"], &[]), &["gfx000"]);
}

#[test]
fn a_gpu_that_does_not_exist() {
    let place = need!(place());
    for selector in ["7", "gfx942", "gpu_id:1", "renderD250", "0000:7f:00.0", "uuid:00000000000000aa"] {
        says(&place.refuses(MODEL, &["--gpu", selector]), &[selector, "GPU"]);
    }
    says(&place.refuses(MODEL, &["--gpu", "0", "--gpu", "5"]), &["5", "GPU"]);
}

#[test]
fn a_worker_that_does_not_exist() {
    let place = need!(place());
    says(&place.refuses(MODEL, &["--worker", "/nonexistent/kfd-worker"]), &["/nonexistent/kfd-worker"]);
    says(&place.refuses(MODEL, &["--model-library", "/nonexistent/m.so"]), &["/nonexistent/m.so"]);
    // The program alone, as somebody might copy it.
    let directory = tempfile::tempdir_in(place.program.parent().unwrap()).unwrap();
    let alone = directory.path().join("vhost-user-kfd");
    std::fs::hard_link(&place.program, &alone).unwrap();
    let socket = place.socket();
    let sentence = place.refused(&alone, &["--socket", socket.to_str().unwrap(), "--kfd", "model:gfx906"]);
    says(&sentence, &["kfd-worker"]);
}

#[test]
fn a_worker_that_is_none() {
    let place = need!(place());
    let sentence = place.refuses(MODEL, &["--worker", "/bin/true"]);
    says(&sentence, &["/bin/true"]);
}

#[test]
fn no_socket_at_all() {
    let place = need!(place());
    says(&place.refused(&place.program, MODEL), &["--socket"]);
    says(&place.refused(&place.program, &["--fd", "77", "--kfd", "model:gfx906"]), &["77"]);
}

/// A VMM whose virtio-gpu knows of no blobs or contexts (QEMU's `vhost-user-gpu-pci`; anything before 11.1): what its
/// driver takes is not enough.
#[test]
fn a_vmm_without_blobs() {
    let place = need!(place());
    let socket = place.socket();
    // RING_RESET (bit 40) is taken unasked by QEMU's own vhost-user-gpu-pci, which lacks the others too.
    for missing in ["RESOURCE_BLOB", "CONTEXT_INIT", "VIRGL", "RING_RESET"] {
        let mut command = Command::new(&place.program);
        command.arg("--socket").arg(&socket).args(MODEL).args(["--once", "--log", "off"]);
        let (stdout, stderr) = (place.directory.path().join("stdout"), place.directory.path().join("stderr"));
        let daemon = Keeper::start_split(command, &stdout, &stderr, LIMIT).unwrap();
        daemon.wait_for_path(&socket, LIMIT).unwrap();
        {
            let vmm = Frontend::connect(&socket, 2).unwrap();
            vmm.set_owner().unwrap();
            // virtio_gpu.h: VIRTIO_GPU_F_VIRGL 0, RESOURCE_BLOB 3, CONTEXT_INIT 4.
            let offered = vmm.get_features().unwrap();
            if missing == "RING_RESET" {
                assert_eq!(offered & 1 << 40, 0, "then this is no case any more");
                vmm.set_features(offered & !(1 << 3 | 1 << 4) | 1 << 40).unwrap();
                let _ = vmm.get_features();
            } else {
                let bit = match missing {
                    "VIRGL" => 1,
                    "RESOURCE_BLOB" => 1 << 3,
                    _ => 1 << 4,
                };
                assert_ne!(offered & bit, 0, "{missing} is offered");
                vmm.set_features(offered & !bit).unwrap();
                // Answered after what was sent before it.
                vmm.get_features().unwrap();
            }
        }
        let status = daemon.wait().unwrap();
        let said = std::fs::read_to_string(&stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{missing}: {said}");
        assert_eq!(said.lines().count(), 1, "{missing}: {said}");
        let named = if missing == "RING_RESET" { "RESOURCE_BLOB" } else { missing };
        says(&said, &["vhost-user-kfd: ", named, "QEMU", "11.1"]);
        assert!(!socket.exists());
    }
}
