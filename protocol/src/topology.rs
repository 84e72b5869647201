//! The topology archive: the files of `/sys/devices/virtual/kfd/kfd/topology` that a VM may see, in one piece.
//!
//! The text of the files goes over the wire as the kernel wrote it, so that a new property reaches the guest
//! without a change of the protocol. Format: a sequence of entries, each the path's length and the content's
//! length (`u16` each), the path relative to the topology directory (`nodes/1/properties`), the bytes.
//!
//! What is in it, sorted by path:
//! - `generation_id` and `system_properties`;
//! - all files of the GPU nodes that the VM was given, under the numbers that the nodes have on the host. No other node
//!   is there: the guest shows its own CPU nodes, and numbers the nodes as it likes;
//! - of their `io_links` and `p2p_links`, those that lead to a GPU that the VM was given or to a CPU node. The numbers of
//!   links keep their gaps, and `io_links_count` and `p2p_links_count` are still the host's: count the entries.
//!   A link whose `node_to` is no node of the archive leads to a CPU node of the host.
//!
//! One thing is changed: where the operator limits the VM's VRAM, `size_in_bytes` of a memory bank in VRAM is no larger
//! than the limit.

use thiserror::Error;

/// Longest path in bytes.
pub const MAX_PATH: usize = 255;
/// Longest file in bytes: sysfs gives at most a page.
pub const MAX_FILE: usize = 4096;
/// Most files in an archive (64 GPUs with some hundreds of caches each).
pub const MAX_FILES: usize = 64 * 1024;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyFile {
    /// Path relative to the topology directory, with `/` between parts.
    pub path: String,
    /// Content.
    pub content: Vec<u8>,
}

/// Why bytes are not an archive, or files do not fit in one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ArchiveError {
    /// The archive ends in the middle of an entry.
    #[error("topology archive: entry at byte {at} ends beyond the archive's {total} bytes")]
    Short {
        /// Where the entry begins.
        at: usize,
        /// Bytes of the archive.
        total: usize,
    },
    /// A path has a form that no topology file has.
    #[error("topology archive: path {path:?} is not a plain relative path of at most {MAX_PATH} bytes")]
    Path {
        /// The path.
        path: String,
    },
    /// A file or the archive is too large.
    #[error("topology archive: {what} has {found}, at most {max} are allowed")]
    TooLarge {
        /// Which.
        what: &'static str,
        /// How many.
        found: usize,
        /// Limit.
        max: usize,
    },
}

fn check_path(path: &str) -> Result<(), ArchiveError> {
    let plain = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.' || byte == b'-')
    };
    if path.len() > MAX_PATH || !path.split('/').all(plain) {
        return Err(ArchiveError::Path { path: path.chars().take(MAX_PATH).collect() });
    }
    Ok(())
}

fn check(what: &'static str, found: usize, max: usize) -> Result<(), ArchiveError> {
    if found > max { Err(ArchiveError::TooLarge { what, found, max }) } else { Ok(()) }
}

/// Packs files into an archive.
pub fn pack(files: &[TopologyFile]) -> Result<Vec<u8>, ArchiveError> {
    check("the number of files", files.len(), MAX_FILES)?;
    let mut archive = Vec::new();
    for file in files {
        check_path(&file.path)?;
        check("the number of bytes of a file", file.content.len(), MAX_FILE)?;
        archive.extend((file.path.len() as u16).to_le_bytes());
        archive.extend((file.content.len() as u16).to_le_bytes());
        archive.extend(file.path.as_bytes());
        archive.extend(&file.content);
        check("the number of bytes of the archive", archive.len(), crate::limits::MAX_TOPOLOGY_BYTES)?;
    }
    Ok(archive)
}

/// Unpacks an archive.
pub fn unpack(archive: &[u8]) -> Result<Vec<TopologyFile>, ArchiveError> {
    check("the number of bytes of the archive", archive.len(), crate::limits::MAX_TOPOLOGY_BYTES)?;
    let mut files = Vec::new();
    let mut rest = archive;
    while !rest.is_empty() {
        let at = archive.len().saturating_sub(rest.len());
        let short = ArchiveError::Short { at, total: archive.len() };
        let (path_len, tail) = rest.split_first_chunk::<2>().ok_or(short.clone())?;
        let (content_len, tail) = tail.split_first_chunk::<2>().ok_or(short.clone())?;
        let (path_len, content_len) =
            (u16::from_le_bytes(*path_len) as usize, u16::from_le_bytes(*content_len) as usize);
        let (path, tail) = tail.split_at_checked(path_len).ok_or(short.clone())?;
        let (content, tail) = tail.split_at_checked(content_len).ok_or(short)?;
        let path = String::from_utf8_lossy(path).into_owned();
        check_path(&path)?;
        check("the number of bytes of a file", content.len(), MAX_FILE)?;
        check("the number of files", files.len(), MAX_FILES)?;
        files.push(TopologyFile { path, content: content.to_vec() });
        rest = tail;
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, content: &str) -> TopologyFile {
        TopologyFile { path: path.into(), content: content.into() }
    }

    #[test]
    fn round_trip_and_golden_bytes() {
        let files = [file("generation_id", "2\n"), file("nodes/0/name", "\n")];
        let archive = pack(&files).unwrap();
        assert_eq!(archive, b"\x0d\x00\x02\x00generation_id2\n\x0c\x00\x01\x00nodes/0/name\n");
        assert_eq!(unpack(&archive).unwrap(), files);
    }

    #[test]
    fn paths_that_leave_the_tree_are_refused() {
        for path in ["../x", "/etc", "a//b", "a/./b", "", "a\0b", "nodes/0/na me"] {
            assert!(pack(&[file(path, "")]).is_err(), "{path:?}");
        }
    }

    #[test]
    fn a_cut_archive_is_an_error_at_every_length() {
        let archive = pack(&[file("nodes/1/properties", "simd_count 240\n")]).unwrap();
        for len in 1..archive.len() {
            assert!(unpack(&archive[..len]).is_err(), "{len}");
        }
    }
}
