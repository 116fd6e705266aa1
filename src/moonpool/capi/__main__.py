from moonpool.capi import root

print(root())
