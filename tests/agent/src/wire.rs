//! The agent's protocol: frames of a JSON header and raw bytes.
//!
//! A frame is `u32` header length, `u32` payload length (both little-endian), the header, the payload. Both sides are
//! ours and are built together, so there is no version; the lengths are bounded all the same, so that a stray byte on
//! the port ends in an error and not in a huge allocation.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Name of the virtio-serial port.
pub const PORT: &str = "org.virtio-kfd.agent";

/// Largest header in bytes.
pub const HEADER_LIMIT: usize = 1 << 20;

/// Largest payload of one frame in bytes; longer data goes in several frames.
pub const PAYLOAD_LIMIT: usize = 1 << 20;

/// A command to run in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Chosen by the host; names the command in all later messages.
    pub id: u32,
    /// Program, looked up in `PATH` unless it contains a slash.
    pub program: String,
    /// Arguments after the program's name.
    pub args: Vec<String>,
    /// Environment variables on top of the agent's own.
    pub env: Vec<(String, String)>,
    /// Working directory; the root directory if none is given.
    pub directory: Option<String>,
    /// Whether [`ToGuest::Stdin`] messages follow; otherwise standard input is empty.
    pub stdin: bool,
    /// After this many milliseconds the command's process group is killed.
    pub limit_ms: Option<u64>,
}

/// What the host asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Run a command. Answered with `Started` or `Failed`, then output, then `Exited`.
    Run(Run),
    /// The payload is written to a command's standard input, which is closed after the last one.
    Stdin {
        /// The command.
        id: u32,
        /// Whether this is the end of its input.
        last: bool,
    },
    /// Sends a signal to a running command.
    Signal {
        /// The command.
        id: u32,
        /// The signal's number.
        signal: i32,
        /// Whether the whole process group gets it.
        group: bool,
    },
    /// Writes the payload to a file. Answered with `Done` or `Failed`.
    Put {
        /// Names this transfer; shares the numbers of commands.
        id: u32,
        /// Where; parent directories are made.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Whether the payload goes to the end of an existing file.
        append: bool,
    },
    /// Reads a file. Answered with `Data` messages and `Done`, or with `Failed`.
    Get {
        /// Names this transfer; shares the numbers of commands.
        id: u32,
        /// Which file.
        path: String,
    },
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit status, if it ended by itself.
    pub code: Option<i32>,
    /// Signal that killed it, if one did.
    pub signal: Option<i32>,
    /// Whether that signal came from its time limit.
    pub timed_out: bool,
    /// From start to end in milliseconds, by the guest's clock.
    pub wall_ms: u64,
}

/// What the guest says when it is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Kernel release, as `uname -r` prints it.
    pub kernel: String,
    /// Uptime in milliseconds when the agent began to serve.
    pub uptime_ms: u64,
    /// Modules that were asked for and could not be loaded, each with the reason.
    pub module_errors: Vec<String>,
}

/// What the guest answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// First message.
    Hello(Hello),
    /// A command runs.
    Started {
        /// The command.
        id: u32,
        /// Its process id in the guest.
        pid: u32,
    },
    /// The payload is standard output of a command.
    Stdout {
        /// The command.
        id: u32,
    },
    /// The payload is standard error of a command.
    Stderr {
        /// The command.
        id: u32,
    },
    /// A command ended; all its own output came before.
    Exited {
        /// The command.
        id: u32,
        /// How it ended.
        exit: Exit,
    },
    /// The payload is a part of a file.
    Data {
        /// The transfer.
        id: u32,
    },
    /// A transfer is complete.
    Done {
        /// The transfer.
        id: u32,
    },
    /// A command could not be started, or a transfer failed.
    Failed {
        /// The command or transfer.
        id: u32,
        /// What failed, and why.
        error: String,
    },
}

/// Writes one frame.
///
/// # Errors
/// A part that is longer than its limit (`InvalidInput`), or what the writer answers.
pub fn write<M: Serialize>(writer: &mut impl Write, message: &M, payload: &[u8]) -> io::Result<()> {
    let header = serde_json::to_vec(message).map_err(io::Error::other)?;
    let mut frame = Vec::with_capacity(8 + header.len() + payload.len());
    frame.extend(length(header.len(), HEADER_LIMIT)?);
    frame.extend(length(payload.len(), PAYLOAD_LIMIT)?);
    frame.extend(header);
    frame.extend(payload);
    writer.write_all(&frame)?;
    writer.flush()
}

fn length(length: usize, limit: usize) -> io::Result<[u8; 4]> {
    match u32::try_from(length) {
        Ok(value) if length <= limit => Ok(value.to_le_bytes()),
        _ => {
            let text = format!("frame part of {length} bytes, at most {limit} are allowed");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// Reads one frame; `None` at an end between two frames.
///
/// # Errors
/// `InvalidData` for a frame that is too long or has an unknown header, `UnexpectedEof` inside a frame, or what the
/// reader answers.
pub fn read<M: DeserializeOwned>(reader: &mut impl Read) -> io::Result<Option<(M, Vec<u8>)>> {
    let mut first = [0];
    if reader.read(&mut first)? == 0 {
        return Ok(None);
    }
    let mut rest = [0; 7];
    reader.read_exact(&mut rest)?;
    let [first] = first;
    let [a, b, c, d, e, f, g] = rest;
    let header = part(reader, u32::from_le_bytes([first, a, b, c]), HEADER_LIMIT)?;
    let payload = part(reader, u32::from_le_bytes([d, e, f, g]), PAYLOAD_LIMIT)?;
    let message = serde_json::from_slice(&header)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("header of a frame: {error}")))?;
    Ok(Some((message, payload)))
}

fn part(reader: &mut impl Read, length: u32, limit: usize) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > limit {
        let text = format!("frame part of {length} bytes, at most {limit} are allowed");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut bytes = vec![0; length];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_in_order() {
        let mut bytes = Vec::new();
        write(&mut bytes, &ToHost::Stdout { id: 7 }, b"hello\0\xff").unwrap();
        write(&mut bytes, &ToHost::Done { id: 8 }, b"").unwrap();
        let mut reader = bytes.as_slice();
        let first = read(&mut reader).unwrap().unwrap();
        assert_eq!(first, (ToHost::Stdout { id: 7 }, b"hello\0\xff".to_vec()));
        assert_eq!(read(&mut reader).unwrap().unwrap(), (ToHost::Done { id: 8 }, Vec::new()));
        assert!(read::<ToHost>(&mut reader).unwrap().is_none());
    }

    #[test]
    fn stray_bytes_are_an_error_and_not_an_allocation() {
        let error = read::<ToHost>(&mut [0xff; 64].as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(
            read::<ToHost>(&mut [1, 0, 0].as_slice()).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        let long = vec![0; PAYLOAD_LIMIT + 1];
        assert!(write(&mut Vec::new(), &ToHost::Data { id: 1 }, &long).is_err());
    }
}
