//! A booted guest, reached through its agent.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kfd_agent::wire::{self, Exit, Hello, PAYLOAD_LIMIT, Run, ToGuest, ToHost};

use crate::vm::Vm;

/// A command for the guest.
#[derive(Debug, Clone)]
pub struct Command {
    program: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    directory: Option<String>,
    stdin: Option<Vec<u8>>,
    talks: bool,
    limit: Duration,
}

impl Command {
    /// A command without arguments and input, with a limit of one minute.
    pub fn new(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            directory: None,
            stdin: None,
            talks: false,
            limit: Duration::from_secs(60),
        }
    }

    /// `sh -c SCRIPT`.
    pub fn shell(script: &str) -> Self {
        Self::new("sh").arg("-c").arg(script)
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    /// Adds arguments.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the working directory.
    pub fn directory(mut self, directory: &str) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Gives it an input.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// Leaves its input open, for [`Running::send`].
    pub fn talks(mut self) -> Self {
        self.talks = true;
        self
    }

    /// Kills it after `limit`.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// What a command printed and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// How it ended.
    pub exit: Exit,
}

impl Output {
    /// Whether it ended with status 0.
    pub fn success(&self) -> bool {
        self.exit.code == Some(0)
    }

    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The output of a command that must have succeeded.
    ///
    /// # Errors
    /// It did not end with status 0; the message carries its output.
    pub fn checked(self) -> Result<Self> {
        if self.success() { Ok(self) } else { Err(anyhow!("{self}")) }
    }
}

impl fmt::Display for Output {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exit {
            Exit { timed_out: true, wall_ms, .. } => {
                writeln!(formatter, "killed by its limit after {wall_ms} ms")?
            }
            Exit { signal: Some(signal), .. } => writeln!(formatter, "killed by signal {signal}")?,
            Exit { code, .. } => writeln!(formatter, "exit status {}", code.unwrap_or(-1))?,
        }
        writeln!(formatter, "--- stdout:\n{}", self.text())?;
        write!(formatter, "--- stderr:\n{}", String::from_utf8_lossy(&self.stderr))
    }
}

type Message = (ToHost, Vec<u8>);

#[derive(Debug)]
struct Connection {
    writer: Mutex<UnixStream>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    last_id: u32,
    /// `None` once the connection has ended.
    receivers: Option<HashMap<u32, Sender<Message>>>,
}

impl Connection {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<(u32, Receiver<Message>)> {
        let mut table = self.table();
        let id = table.last_id.wrapping_add(1);
        table.last_id = id;
        let (sender, receiver) = mpsc::channel();
        table.receivers.as_mut().context("the guest's agent has hung up")?.insert(id, sender);
        Ok((id, receiver))
    }

    fn send(&self, message: &ToGuest, payload: &[u8]) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        wire::write(&mut *writer, message, payload).context("send to the guest's agent")
    }
}

/// A guest that is up; its machine is killed when this is dropped.
#[derive(Debug)]
pub struct Guest {
    connection: Arc<Connection>,
    hello: Hello,
    vm: Vm,
}

/// A command that runs in the guest. Dropping it leaves it running.
#[derive(Debug)]
pub struct Running {
    connection: Arc<Connection>,
    receiver: Receiver<Message>,
    id: u32,
    pid: u32,
    limit: Duration,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exit: Option<Exit>,
}

impl Guest {
    /// Waits for the agent's first message on `stream`.
    pub(crate) fn connect(stream: UnixStream, vm: Vm, limit: Duration) -> Result<Self> {
        let mut reader = stream.try_clone().context("duplicate the agent's socket")?;
        let table = Table { last_id: 0, receivers: Some(HashMap::new()) };
        let connection = Arc::new(Connection { writer: Mutex::new(stream), table: Mutex::new(table) });
        let (first, hello) = mpsc::channel();
        let shared = Arc::clone(&connection);
        std::thread::spawn(move || {
            while let Ok(Some((message, payload))) = wire::read::<ToHost>(&mut reader) {
                let (id, last) = match &message {
                    ToHost::Hello(hello) => {
                        let _ = first.send(hello.clone());
                        continue;
                    }
                    ToHost::Started { id, .. }
                    | ToHost::Stdout { id }
                    | ToHost::Stderr { id }
                    | ToHost::Data { id } => (*id, false),
                    ToHost::Exited { id, .. } | ToHost::Done { id } | ToHost::Failed { id, .. } => {
                        (*id, true)
                    }
                };
                let mut table = shared.table();
                let Some(receivers) = &mut table.receivers else { break };
                // A message for a command whose handle is gone is dropped.
                let sender = if last { receivers.remove(&id) } else { receivers.get(&id).cloned() };
                let _ = sender.map(|sender| sender.send((message, payload)));
            }
            shared.table().receivers = None;
        });
        let start = Instant::now();
        let hello = loop {
            match hello.recv_timeout(Duration::from_millis(100)) {
                Ok(hello) => break hello,
                Err(RecvTimeoutError::Timeout) if vm.is_running() && start.elapsed() < limit => {}
                Err(_) => bail!("the guest did not come up\n{}", vm.report()),
            }
        };
        if !hello.module_errors.is_empty() {
            bail!("modules in the guest: {}\n{}", hello.module_errors.join("; "), vm.report());
        }
        Ok(Self { connection, hello, vm })
    }

    /// What the agent said first.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The machine.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Runs a command to its end. A command that fails is not an error here; see [`Output::checked`].
    ///
    /// # Errors
    /// The command cannot be started, or the guest went away.
    pub fn run(&self, command: &Command) -> Result<Output> {
        self.spawn(command)?.wait().map_err(|error| self.explain(error))
    }

    /// Starts a command.
    ///
    /// # Errors
    /// The command cannot be started, or the guest went away.
    pub fn spawn(&self, command: &Command) -> Result<Running> {
        self.try_spawn(command).map_err(|error| self.explain(error))
    }

    fn try_spawn(&self, command: &Command) -> Result<Running> {
        let (id, receiver) = self.connection.open()?;
        let run = Run {
            id,
            program: command.program.clone(),
            args: command.args.clone(),
            env: command.env.clone(),
            directory: command.directory.clone(),
            stdin: command.stdin.is_some() || command.talks,
            limit_ms: Some(u64::try_from(command.limit.as_millis()).unwrap_or(u64::MAX)),
        };
        self.connection.send(&ToGuest::Run(run), &[])?;
        let pid = match receiver.recv() {
            Ok((ToHost::Started { pid, .. }, _)) => pid,
            Ok((ToHost::Failed { error, .. }, _)) => bail!("{error}"),
            Ok((other, _)) => bail!("expected Started, found {other:?}"),
            Err(_) => bail!("the guest's agent has hung up"),
        };
        if let Some(input) = &command.stdin {
            for part in input.chunks(PAYLOAD_LIMIT) {
                self.connection.send(&ToGuest::Stdin { id, last: false }, part)?;
            }
            self.connection.send(&ToGuest::Stdin { id, last: !command.talks }, &[])?;
        }
        let connection = Arc::clone(&self.connection);
        let limit = command.limit;
        Ok(Running {
            connection,
            receiver,
            id,
            pid,
            limit,
            stdout: Vec::new(),
            stderr: Vec::new(),
            exit: None,
        })
    }

    /// Writes `bytes` to a file of the guest.
    ///
    /// # Errors
    /// The file cannot be written, or the guest went away.
    pub fn put(&self, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let mut parts = bytes.chunks(PAYLOAD_LIMIT);
        let first = parts.next().unwrap_or_default();
        for (number, part) in std::iter::once(first).chain(parts).enumerate() {
            let (id, receiver) = self.connection.open()?;
            let put = ToGuest::Put { id, path: path.to_owned(), mode, append: number > 0 };
            self.connection.send(&put, part)?;
            match receiver.recv() {
                Ok((ToHost::Done { .. }, _)) => {}
                Ok((ToHost::Failed { error, .. }, _)) => return Err(self.explain(anyhow!("{error}"))),
                _ => return Err(self.explain(anyhow!("the guest's agent has hung up"))),
            }
        }
        Ok(())
    }

    /// Copies a file of the host into the guest as an executable.
    ///
    /// # Errors
    /// The file cannot be read or written, or the guest went away.
    pub fn put_program(&self, path: &str, host: &Path) -> Result<()> {
        let bytes = std::fs::read(host).with_context(|| format!("read {}", host.display()))?;
        self.put(path, 0o755, &bytes)
    }

    /// Reads a file of the guest.
    ///
    /// # Errors
    /// The file cannot be read, or the guest went away.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        let (id, receiver) = self.connection.open()?;
        self.connection.send(&ToGuest::Get { id, path: path.to_owned() }, &[])?;
        let mut bytes = Vec::new();
        loop {
            match receiver.recv() {
                Ok((ToHost::Data { .. }, part)) => bytes.extend(part),
                Ok((ToHost::Done { .. }, _)) => return Ok(bytes),
                Ok((ToHost::Failed { error, .. }, _)) => return Err(self.explain(anyhow!("{error}"))),
                _ => return Err(self.explain(anyhow!("the guest's agent has hung up"))),
            }
        }
    }

    /// Kills the machine and returns what it printed on its console.
    pub fn kill(self) -> String {
        self.vm.kill()
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        error.context(self.vm.report())
    }
}

impl Running {
    /// Its process id in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// The guest went away.
    pub fn signal(&self, signal: i32) -> Result<()> {
        self.connection.send(&ToGuest::Signal { id: self.id, signal, group: false }, &[])
    }

    /// Kills it and its children.
    ///
    /// # Errors
    /// The guest went away.
    pub fn kill(&self) -> Result<()> {
        self.connection.send(&ToGuest::Signal { id: self.id, signal: 9, group: true }, &[])
    }

    /// Gives more input to a command that [talks](Command::talks).
    ///
    /// # Errors
    /// The guest went away.
    pub fn send(&self, bytes: &[u8]) -> Result<()> {
        self.connection.send(&ToGuest::Stdin { id: self.id, last: false }, bytes)
    }

    /// Takes the next line of its standard output, without the line's end; `None` at its end. What is taken is no part
    /// of the [`Output`].
    ///
    /// # Errors
    /// The time passed before that, or the guest went away.
    pub fn next_line(&mut self, limit: Duration) -> Result<Option<String>> {
        let start = Instant::now();
        loop {
            if let Some(end) = self.stdout.iter().position(|byte| *byte == b'\n') {
                let rest = self.stdout.split_off(end.saturating_add(1));
                let line = std::mem::replace(&mut self.stdout, rest);
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            if self.exit.is_some() {
                return Ok(None);
            }
            match self.receiver.recv_timeout(limit.saturating_sub(start.elapsed())) {
                Ok((ToHost::Stdout { .. }, bytes)) => self.stdout.extend(bytes),
                Ok((ToHost::Stderr { .. }, bytes)) => self.stderr.extend(bytes),
                Ok((ToHost::Exited { exit, .. }, _)) => self.exit = Some(exit),
                Ok((other, _)) => bail!("waiting for a line: {other:?}"),
                Err(error) => bail!("waiting for a line: {error}"),
            }
        }
    }

    /// Waits until its standard output contains `text`.
    ///
    /// # Errors
    /// It ended, or the time passed, before that.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let seen = String::from_utf8_lossy(&self.stdout);
            if seen.contains(text) {
                return Ok(());
            }
            match self.receiver.recv_timeout(limit.saturating_sub(start.elapsed())) {
                Ok((ToHost::Stdout { .. }, bytes)) => self.stdout.extend(bytes),
                Ok((ToHost::Stderr { .. }, bytes)) => self.stderr.extend(bytes),
                Ok((other, _)) => bail!("waiting for {text:?}: {other:?} after output {seen:?}"),
                Err(error) => bail!("waiting for {text:?}: {error} after output {seen:?}"),
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The guest went away, or its agent does not answer long after the command's limit.
    pub fn wait(mut self) -> Result<Output> {
        // The agent kills the command at its limit; this only covers an agent that cannot.
        let patience = self.limit.saturating_add(Duration::from_secs(30));
        loop {
            if let Some(exit) = self.exit {
                return Ok(Output { stdout: self.stdout, stderr: self.stderr, exit });
            }
            match self.receiver.recv_timeout(patience) {
                Ok((ToHost::Stdout { .. }, bytes)) => self.stdout.extend(bytes),
                Ok((ToHost::Stderr { .. }, bytes)) => self.stderr.extend(bytes),
                Ok((ToHost::Exited { exit, .. }, _)) => self.exit = Some(exit),
                Ok((ToHost::Failed { error, .. }, _)) => bail!("{error}"),
                Ok((other, _)) => bail!("expected output or an end, found {other:?}"),
                Err(error) => bail!("the guest's agent: {error}"),
            }
        }
    }
}
