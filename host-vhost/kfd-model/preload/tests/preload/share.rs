//! Processes of unmodified C programs that share memory, and the machine's memory.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kfd_model::debug::Mailbox;

use crate::support::{compile, library};

struct Program {
    program: PathBuf,
    directory: tempfile::TempDir,
}

impl Program {
    /// Compiles it; `None`, with the reason printed, where that is not possible.
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let program = compile("share.c", directory.path())?;
        Some(Self { program, directory })
    }

    fn machine(&self) -> PathBuf {
        self.directory.path().join("machine")
    }

    fn mailboxes(&self) -> &Path {
        self.directory.path()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("120").arg(&self.program).args(arguments);
        command.env("LD_PRELOAD", library()).env("VIRTIO_KFD_MODEL", "gfx906");
        command.env("VIRTIO_KFD_MODEL_MACHINE", self.machine());
        command.env("VIRTIO_KFD_MODEL_DEBUG", self.mailboxes());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    fn available(&self) -> u64 {
        let output = self.command(&["available"]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    /// Starts one that takes `mib` MiB of VRAM, with a child that lives as long as its input is open. `timeout` is not
    /// between: it is to be killed itself.
    fn hold(&self, mib: u64) -> (Child, ChildStdin) {
        let mut command = self.command(&[]);
        let mut direct = Command::new(&self.program);
        for (name, value) in command.get_envs() {
            direct.env(name, value.unwrap_or_default());
        }
        command = direct;
        command.args(["hold", &mib.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        assert_eq!(line(&mut BufReader::new(child.stdout.take().unwrap())), "held");
        let input = child.stdin.take().unwrap();
        (child, input)
    }
}

fn line(from: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn a_dma_buf_passed_on_is_one_memory_for_two_processes_and_their_gpus() {
    let Some(program) = Program::new() else { return };
    let mut child = program.command(&["pass"]).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let gpu: u32 = line(&mut output).parse().expect("the program stopped at a check");
    // What the importer's GPU sees at its address, when the exporter has freed its buffer.
    let va = 0x7000_0000_0000;
    let mailboxes = Mailbox::find(program.mailboxes()).unwrap();
    assert_eq!(mailboxes.len(), 2, "both processes");
    let sees = |mailbox: &&Mailbox| mailbox.read(gpu, va, &mut [0; 1]).is_ok();
    let importer = mailboxes.iter().find(sees).unwrap();
    assert_eq!(mailboxes.iter().filter(sees).count(), 1);
    let mut bytes = [0; 3 * 4096];
    importer.read(gpu, va, &mut bytes).unwrap();
    assert_eq!((&bytes[..3], bytes[4096], bytes[3 * 4096 - 1]), (&b"ptp"[..], b'p', b'e'));
    importer.write(gpu, va + 4096, b"from GPU").unwrap();
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(line(&mut output), "from GPU", "what the CPU's map of the dma-buf shows");
    assert!(child.wait().unwrap().success());
    assert_eq!(Mailbox::find(program.mailboxes()).unwrap().len(), 0);
    let left = std::fs::read_dir(program.mailboxes()).unwrap();
    let left = left.filter(|entry| entry.as_ref().unwrap().path().extension().is_some()).count();
    assert_eq!(left, 0, "a process that exits removes its mailbox");
}

#[test]
fn memory_of_other_processes_is_gone_and_comes_back() {
    let Some(program) = Program::new() else { return };
    let all = program.available();
    for _ in 0..3 {
        let ((mut one, _one), (mut two, _two)) = (program.hold(512), program.hold(1024));
        assert_eq!(program.available(), all - (1536 << 20));
        // SIGKILL.
        one.kill().unwrap();
        one.wait().unwrap();
        assert_eq!(program.available(), all - (1024 << 20));
        two.kill().unwrap();
        two.wait().unwrap();
        assert_eq!(program.available(), all, "nothing drifts");
    }
}
