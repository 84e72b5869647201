//! QEMU's monitor: devices that are plugged in and out of a running machine.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long QEMU may take to answer a command.
const ANSWER: Duration = Duration::from_secs(60);

/// A connection to the monitor.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects to the monitor that listens at `socket`.
    ///
    /// # Errors
    /// Nobody listens there, or it is no monitor.
    pub fn connect(socket: &Path) -> Result<Self> {
        let writer =
            UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        writer.set_read_timeout(Some(ANSWER)).context("the monitor's socket")?;
        let reader = BufReader::new(writer.try_clone().context("duplicate the monitor's socket")?);
        let mut qmp = Self { reader, writer, events: Vec::new() };
        let greeting = qmp.receive()?;
        if greeting.get("QMP").is_none() {
            bail!("expected QEMU's greeting, found {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    ///
    /// # Errors
    /// QEMU refuses it; the message has its reason.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        self.writer.write_all(format!("{request}\n").as_bytes()).context("send to the monitor")?;
        loop {
            let mut answer = self.receive()?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            } else {
                bail!("{command}: {answer}");
            }
        }
    }

    /// Waits for the first of these events that has come or comes, and returns its name; `None` when `limit` passes.
    ///
    /// # Errors
    /// QEMU went away.
    pub fn wait_for(&mut self, names: &[&str], limit: Duration) -> Result<Option<String>> {
        let start = Instant::now();
        loop {
            let name = |event: &Value| event.get("event").and_then(Value::as_str).map(str::to_owned);
            let wanted = |event: &Value| name(event).is_some_and(|name| names.contains(&name.as_str()));
            if let Some(at) = self.events.iter().position(wanted) {
                return Ok(name(&self.events.remove(at)));
            }
            if start.elapsed() > limit {
                return Ok(None);
            }
            // An answer brings the events that came before it along.
            self.execute("query-status", json!({}))?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).context("the monitor")? == 0 {
            bail!("QEMU has closed its monitor");
        }
        serde_json::from_str(&line).with_context(|| format!("the monitor said {line:?}"))
    }
}
