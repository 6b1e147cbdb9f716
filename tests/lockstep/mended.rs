//! Short sequences that once were answered differently, or that random ones meet seldom.

/// Each with the reason why it is here.
pub const SEQUENCES: [(&str, &str); 13] = [
    (
        "the set-group-id bit of a new file depends on the mode before the umask",
        "library-1 mkdir . d 0777
        library-1 chown . d 0 2000 0
        library-1 chmod . d 02777
        library-1 user 1000 1000 -
        library-1 umask 077
        library-1 open . d/l1 O_RDWR|O_CREAT 02775
        library-1 stat . d/l1 0
        library-1 mknod . d/l2 S_IFREG 02775
        library-1 stat . d/l2 0
        library-1 mkdir . d/l3 02775
        library-1 stat . d/l3 0
        library-1 open . d O_RDWR|O_TMPFILE 02775
        library-1 fstat 4
        library-1 umask 07
        library-1 open . d/l4 O_RDWR|O_CREAT 02775
        library-1 stat . d/l4 0
        library-1 open . d/l5 O_RDWR|O_CREAT 02765
        library-1 stat . d/l5 0
        mount user 1000 1000 -
        mount umask 077
        mount open . d/m1 O_RDWR|O_CREAT 02775
        mount stat . d/m1 0
        mount mknod . d/m2 S_IFREG 02775
        mount stat . d/m2 0
        mount mkdir . d/m3 02775
        mount stat . d/m3 0
        mount open . d O_RDWR|O_TMPFILE 02775
        mount fstat 4
        mount umask 07
        mount open . d/m4 O_RDWR|O_CREAT 02775
        mount stat . d/m4 0
        mount open . d/m5 O_RDWR|O_CREAT 02765
        mount stat . d/m5 0",
    ),
    (
        "an open file gets a name in a directory behind an absolute link",
        "library-1 mkdir . d 0777
        library-1 symlink FOLDER/d . s
        library-1 open . . O_RDWR|O_TMPFILE 0666
        library-1 linkfd 3 . s/x
        library-1 link 3 \"\" . s/y AT_EMPTY_PATH
        library-1 linkfd 3 . s/x
        library-1 linkfd 3 . s/y/z
        mount tree . FOLDER",
    ),
    (
        "`..` follows only a directory that the user may search, also behind an absolute link",
        "library-1 open . f O_RDWR|O_CREAT 0666
        library-1 mkdir . d 0777
        library-1 symlink FOLDER/d . s
        library-1 symlink FOLDER/x . t
        library-1 symlink FOLDER/f . u
        library-1 stat . s/.. 0
        library-1 stat . t/.. 0
        library-1 stat . u/.. 0
        library-1 open . t/.. O_WRONLY|O_TRUNC 0
        library-1 list . s/../d/../s
        library-1 chmod . d 0
        library-1 user 1000
        library-1 stat . s/.. 0",
    ),
    (
        "the locks of a process stay over an exec after which the first call is one on the locked file",
        "library-1 open . a O_RDWR|O_CREAT 0666
        library-2 open . a O_RDWR 0
        library-2 lock 3 F_SETLK F_RDLCK 0 1
        library-1 lock 3 F_SETLK F_WRLCK 1 10
        library-1 exec
        library-1 lock 3 F_SETLK F_WRLCK 30 40
        library-2 lock 3 F_SETLK F_WRLCK 0 10",
    ),
    (
        "a child locks a file that its parent opened as another user",
        "library-1 open . a O_RDWR|O_CREAT 0600
        library-1 user 1001 1001 2000
        library-1 fork lock 3 F_OFD_SETLK F_WRLCK 20 20
        library-2 open . a O_RDWR 0
        library-2 lock 3 F_OFD_SETLK F_WRLCK 20 20
        library-1 close 3
        library-2 lock 3 F_OFD_SETLK F_WRLCK 20 20",
    ),
    (
        "O_NOATIME of another user's socket is refused before the open of a socket is",
        "mount mknod . s S_IFSOCK 0666
        library-1 user 1000 1000 -
        library-1 open . s O_RDONLY|O_NOATIME 0
        library-1 open . s O_RDONLY 0",
    ),
    (
        "a child that first asks for the flags of a file keeps the lock that its parent took by the same description",
        "library-1 open . a O_RDWR|O_CREAT 0666
        library-2 open . a O_RDWR 0
        library-1 flock 3 LOCK_EX|LOCK_NB
        library-1 bear
        library-1 child getfl 3
        library-1 close 3
        library-2 flock 3 LOCK_EX|LOCK_NB
        library-1 bury
        library-2 flock 3 LOCK_EX|LOCK_NB",
    ),
    (
        "a slash behind the name of a new file is an error only in a directory that the user may search",
        "library-1 mkdir . d 0777
        library-1 open . f O_RDWR|O_CREAT 0666
        library-1 chmod . d 0700
        library-2 user 1000 1000 -
        library-2 open . d/a/ O_RDWR|O_CREAT 0666
        library-1 open . d/a/ O_RDWR|O_CREAT 0666
        library-1 open . f/a/ O_RDWR|O_CREAT 0666",
    ),
    (
        "a chown that changes nothing is refused if it clears the set-id bits of another user's file",
        "library-1 open . f O_RDWR|O_CREAT 0666
        library-1 close 3
        library-1 chmod . f 06777
        mount user 1000 1000 -
        mount chown . f -1 -1 0
        mount stat . f 0
        library-2 user 1000 1000 -
        library-2 chown . f -1 -1 0
        mount open . f O_WRONLY 0
        mount write 3 1 x
        mount stat . f 0
        mount chown . f -1 -1 0",
    ),
    (
        "a directory gives no bytes to a sendfile of none",
        "library-1 mkdir . d 0777
        library-1 open . d O_RDONLY|O_DIRECTORY 0
        library-1 open . f O_RDWR|O_CREAT 0666
        library-1 sendfile 4 3 -1 0
        library-1 sendfile 4 3 5 0
        library-1 sendfile 4 3 -1 1
        library-1 sendfile 3 4 -1 0
        library-1 setfl 4 O_APPEND
        library-1 sendfile 4 3 -1 0",
    ),
    (
        "a walk that is confined to a directory opens a FIFO in it",
        "library-1 mkdir . d 0777
        library-1 mknod . d/p S_IFIFO 0666
        library-1 symlink /p . d/s
        library-1 open . d O_RDONLY|O_DIRECTORY 0
        library-1 open2 3 p O_RDWR|O_NONBLOCK RESOLVE_IN_ROOT
        library-1 open2 3 /p O_RDWR|O_NONBLOCK RESOLVE_IN_ROOT
        library-1 open2 3 s O_RDWR|O_NONBLOCK RESOLVE_IN_ROOT
        library-1 open2 3 p O_RDWR|O_NONBLOCK RESOLVE_BENEATH
        library-1 open2 3 s O_RDWR|O_NONBLOCK RESOLVE_BENEATH
        library-1 open2 . d/p O_RDWR|O_NONBLOCK RESOLVE_BENEATH
        library-1 write 4 5 x
        library-1 read 5 5
        library-1 fstat 6",
    ),
    (
        "a name relative to an open FIFO is one in no directory, also after the kernel was told to forget the FIFO's name",
        "library-2 mknod . d S_IFIFO 0777
        library-2 open . d O_RDWR|O_NONBLOCK 0666
        library-2 mknod . e S_IFREG 0644
        mount tree . FOLDER
        library-2 stat 3 a 0
        library-2 open 3 a O_RDWR|O_CREAT 0666
        library-2 rename 3 a . f 0
        library-2 mkdir 3 ../g 0755
        mount tree . FOLDER",
    ),
    (
        "an open FIFO gets a name, and no file of another file system does",
        "library-1 mknod . d S_IFIFO 0666
        library-1 mkdir . g 0777
        library-1 symlink FOLDER/g . s
        library-1 open . d O_RDWR|O_NONBLOCK 0
        library-1 linkfd 3 . e
        library-1 linkfd 3 . e
        library-1 linkfd 3 . g/x/y
        library-1 link 3 \"\" . g/f AT_EMPTY_PATH
        library-1 link 3 \"\" . s/h AT_EMPTY_PATH
        library-1 fstat 3
        library-1 link . /dev/null . n 0
        library-2 tree . FOLDER",
    ),
];
