//! Serves one connection: commands, signals and file transfers, any number at once.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use crate::wire::{self, Exit, Hello, Run, ToGuest, ToHost};

/// How long output is awaited after a command's end, when a process that it left behind holds its pipes open.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes of output in one message.
const CHUNK: usize = 32 * 1024;

/// A command that has not been reaped, so that its process id is its own.
struct Running {
    pid: Pid,
    stdin: Option<Sender<Vec<u8>>>,
    timed_out: bool,
}

struct Shared {
    writer: Mutex<Box<dyn Write + Send>>,
    running: Mutex<HashMap<u32, Running>>,
}

impl Shared {
    /// Sends a message. A host that does not listen any more is noticed by the reader.
    fn send(&self, message: &ToHost, payload: &[u8]) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = wire::write(&mut *writer, message, payload);
    }

    fn running(&self) -> MutexGuard<'_, HashMap<u32, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, id: u32, error: impl std::fmt::Display) {
        self.send(&ToHost::Failed { id, error: error.to_string() }, &[]);
    }
}

/// Says hello and serves requests until the host hangs up.
///
/// # Errors
/// A frame that cannot be read.
pub fn serve(mut reader: impl Read, writer: impl Write + Send + 'static, hello: Hello) -> io::Result<()> {
    let shared = Arc::new(Shared { writer: Mutex::new(Box::new(writer)), running: Mutex::default() });
    shared.send(&ToHost::Hello(hello), &[]);
    while let Some((message, payload)) = wire::read::<ToGuest>(&mut reader)? {
        match message {
            ToGuest::Run(run) => start(&shared, run),
            ToGuest::Stdin { id, last } => {
                if let Some(command) = shared.running().get_mut(&id) {
                    // A command that has closed its input does not want the rest.
                    let _ = command.stdin.as_ref().map(|stdin| stdin.send(payload));
                    if last {
                        command.stdin = None;
                    }
                }
            }
            ToGuest::Signal { id, signal, group } => {
                if let Err(error) = deliver(&shared, id, signal, group) {
                    shared.fail(id, error);
                }
            }
            ToGuest::Put { id, path, mode, append } => match put(Path::new(&path), mode, append, &payload) {
                Ok(()) => shared.send(&ToHost::Done { id }, &[]),
                Err(error) => shared.fail(id, format!("write {path}: {error}")),
            },
            ToGuest::Get { id, path } => match get(&shared, id, Path::new(&path)) {
                Ok(()) => shared.send(&ToHost::Done { id }, &[]),
                Err(error) => shared.fail(id, format!("read {path}: {error}")),
            },
        }
    }
    Ok(())
}

fn start(shared: &Arc<Shared>, run: Run) {
    let mut command = Command::new(&run.program);
    command.args(&run.args).envs(run.env.iter().map(|(name, value)| (name, value)));
    command.current_dir(run.directory.as_deref().unwrap_or("/"));
    command.stdin(if run.stdin { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let started = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return shared.fail(run.id, format!("start {}: {error}", run.program)),
    };
    let stdin = child.stdin.take().map(|mut pipe| {
        let (sender, receiver) = mpsc::channel::<Vec<u8>>();
        std::thread::spawn(move || {
            for bytes in receiver {
                if pipe.write_all(&bytes).is_err() {
                    break;
                }
            }
        });
        sender
    });
    let pid = Pid::from_child(&child);
    shared.running().insert(run.id, Running { pid, stdin, timed_out: false });
    shared.send(&ToHost::Started { id: run.id, pid: child.id() }, &[]);
    let shared = Arc::clone(shared);
    std::thread::spawn(move || attend(&shared, &run, child, started));
}

/// Carries a command's output to the host and reports its end.
fn attend(shared: &Arc<Shared>, run: &Run, mut child: Child, started: Instant) {
    let id = run.id;
    let (ended, pumps) = mpsc::channel::<()>();
    if let Some(pipe) = child.stdout.take() {
        pump(shared, pipe, ToHost::Stdout { id }, ended.clone());
    }
    if let Some(pipe) = child.stderr.take() {
        pump(shared, pipe, ToHost::Stderr { id }, ended.clone());
    }
    drop(ended);
    let limit = run.limit_ms.map(|limit| watch(shared, id, Duration::from_millis(limit)));
    // Wait without reaping first: as long as the entry is in the table the process id cannot be another's.
    let pid = Pid::from_child(&child);
    while let Err(rustix::io::Errno::INTR) =
        rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
    {}
    let entry = shared.running().remove(&id);
    let status = child.wait();
    let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    drop(limit);
    // Ends when both pumps have ended, or after LINGER.
    while let Ok(()) = pumps.recv_timeout(LINGER) {}
    match status {
        Ok(status) => {
            let exit = Exit {
                code: status.code(),
                signal: status.signal(),
                timed_out: entry.is_some_and(|entry| entry.timed_out),
                wall_ms,
            };
            shared.send(&ToHost::Exited { id, exit }, &[]);
        }
        Err(error) => shared.fail(id, format!("wait for {}: {error}", run.program)),
    }
}

fn pump(shared: &Arc<Shared>, mut pipe: impl Read + Send + 'static, message: ToHost, ended: Sender<()>) {
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(length) = pipe.read(&mut buffer) {
            match buffer.get(..length) {
                Some(bytes) if length > 0 => shared.send(&message, bytes),
                _ => break,
            }
        }
        let _ = ended.send(());
    });
}

/// Kills a command's group when `limit` passes before the returned value is dropped.
fn watch(shared: &Arc<Shared>, id: u32, limit: Duration) -> Sender<()> {
    let (alive, receiver) = mpsc::channel::<()>();
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
            && let Some(command) = shared.running().get_mut(&id)
        {
            command.timed_out = true;
            let _ = rustix::process::kill_process_group(command.pid, Signal::KILL);
        }
    });
    alive
}

fn deliver(shared: &Shared, id: u32, signal: i32, group: bool) -> Result<(), String> {
    let signal =
        Signal::from_named_raw(signal).ok_or_else(|| format!("no signal has the number {signal}"))?;
    let running = shared.running();
    // The command may have ended on its own meanwhile; its Exited message says so.
    let Some(command) = running.get(&id) else { return Ok(()) };
    let answer = if group {
        rustix::process::kill_process_group(command.pid, signal)
    } else {
        rustix::process::kill_process(command.pid, signal)
    };
    answer.map_err(|error| format!("signal command {id}: {error}"))
}

fn put(path: &Path, mode: u32, append: bool, bytes: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file =
        File::options().create(true).write(true).truncate(!append).append(append).mode(mode).open(path)?;
    file.write_all(bytes)?;
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn get(shared: &Shared, id: u32, path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = file.read(&mut buffer)?;
        match buffer.get(..length) {
            Some(bytes) if length > 0 => shared.send(&ToHost::Data { id }, bytes),
            _ => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    struct Host(UnixStream);

    impl Host {
        fn new() -> Self {
            let (host, guest) = UnixStream::pair().unwrap();
            let writer = guest.try_clone().unwrap();
            std::thread::spawn(move || serve(guest, writer, Hello::default()));
            let mut host = Self(host);
            assert!(matches!(host.receive().0, ToHost::Hello(_)));
            host
        }

        fn send(&mut self, message: ToGuest, payload: &[u8]) {
            wire::write(&mut self.0, &message, payload).unwrap();
        }

        fn receive(&mut self) -> (ToHost, Vec<u8>) {
            wire::read(&mut self.0).unwrap().unwrap()
        }

        fn shell(&mut self, id: u32, script: &str, stdin: bool, limit_ms: Option<u64>) {
            let run = Run {
                id,
                program: "sh".into(),
                args: vec!["-c".into(), script.into()],
                env: vec![("COLOUR".into(), "blue".into())],
                directory: None,
                stdin,
                limit_ms,
            };
            self.send(ToGuest::Run(run), &[]);
        }

        /// Output, error output and end of the command.
        fn finish(&mut self, wanted: u32) -> (Vec<u8>, Vec<u8>, Exit) {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            loop {
                match self.receive() {
                    (ToHost::Stdout { id }, bytes) if id == wanted => out.extend(bytes),
                    (ToHost::Stderr { id }, bytes) if id == wanted => err.extend(bytes),
                    (ToHost::Exited { id, exit }, _) if id == wanted => return (out, err, exit),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_command_gets_input_and_environment_and_returns_output_and_status() {
        let mut host = Host::new();
        host.shell(1, "cat; echo $COLOUR >&2; exit 7", true, None);
        host.send(ToGuest::Stdin { id: 1, last: false }, b"one ");
        host.send(ToGuest::Stdin { id: 1, last: true }, b"two");
        let (out, err, exit) = host.finish(1);
        assert_eq!((out.as_slice(), err.as_slice()), (b"one two".as_slice(), b"blue\n".as_slice()));
        assert_eq!((exit.code, exit.signal, exit.timed_out), (Some(7), None, false));
    }

    #[test]
    fn commands_run_at_once_and_one_can_be_killed() {
        let mut host = Host::new();
        host.shell(1, "exec sleep 600", false, None);
        host.shell(2, "echo quick", false, None);
        let (out, _, exit) = host.finish(2);
        assert_eq!((out.as_slice(), exit.code), (b"quick\n".as_slice(), Some(0)));
        host.send(ToGuest::Signal { id: 1, signal: 9, group: false }, &[]);
        let (_, _, exit) = host.finish(1);
        assert_eq!((exit.code, exit.signal, exit.timed_out), (None, Some(9), false));
    }

    #[test]
    fn a_command_past_its_limit_is_killed_with_its_children() {
        let mut host = Host::new();
        host.shell(1, "sleep 600 & wait", false, Some(50));
        let (_, _, exit) = host.finish(1);
        assert_eq!((exit.signal, exit.timed_out), (Some(9), true));
    }

    #[test]
    fn files_go_in_and_out() {
        let mut host = Host::new();
        let directory = std::env::temp_dir().join(format!("kfd-agent-{}", std::process::id()));
        let path = directory.join("deep/file").to_string_lossy().into_owned();
        host.send(ToGuest::Put { id: 1, path: path.clone(), mode: 0o640, append: false }, b"first ");
        host.send(ToGuest::Put { id: 2, path: path.clone(), mode: 0o640, append: true }, b"second");
        assert_eq!(host.receive().0, ToHost::Done { id: 1 });
        assert_eq!(host.receive().0, ToHost::Done { id: 2 });
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        host.send(ToGuest::Get { id: 3, path }, &[]);
        assert_eq!(host.receive(), (ToHost::Data { id: 3 }, b"first second".to_vec()));
        assert_eq!(host.receive().0, ToHost::Done { id: 3 });
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        let mut host = Host::new();
        let run = Run {
            id: 4,
            program: "/no/such/program".into(),
            args: Vec::new(),
            env: Vec::new(),
            directory: None,
            stdin: false,
            limit_ms: None,
        };
        host.send(ToGuest::Run(run), &[]);
        let (ToHost::Failed { id: 4, error }, _) = host.receive() else { panic!("not Failed") };
        assert!(error.contains("/no/such/program") && error.contains("No such file"), "{error}");
        host.send(ToGuest::Get { id: 5, path: "/no/such/file".into() }, &[]);
        assert!(matches!(host.receive().0, ToHost::Failed { id: 5, .. }));
    }
}
